/* A libnvidia-ml.so.1 without devices: it answers what a script tells it, see script.h.

   The variant OLD_DRIVER lacks what drivers of 2020 lack, NEW_DRIVER what CUDA 14 takes away. */

#include "script.h"

/* --- how functions fail ----------------------------------------------------------------------- */

static int failure(device_t device, const char *function) {
    char key[80];
    rule_t *rule;
    num_calls++;
    if (!opened) return UNINITIALIZED;
    snprintf(key, sizeof key, "!%s", function);
    if (device) {
        if ((rule = find(device->index, key, 0))) return (int)rule->value;
        if ((rule = find(device->index, "!*", 0))) return (int)rule->value;
    }
    return (rule = find(-1, key, 0)) ? (int)rule->value : SUCCESS;
}

#define CHECK(device)                                                                              \
    do {                                                                                           \
        int code = failure(device, __func__);                                                      \
        if (code) return code;                                                                     \
    } while (0)

#define GET(result, type, key)                                                                     \
    do {                                                                                           \
        rule_t *rule;                                                                              \
        CHECK(device);                                                                             \
        if (!(rule = find(device->index, key, 0))) return NOT_SUPPORTED;                           \
        /* Through a signed number, so that -1 is the value that stands for "none". */                \
        *(result) = (type)(long long)rule->value;                                                             \
        return SUCCESS;                                                                            \
    } while (0)

/* --- the library ------------------------------------------------------------------------------ */

int nvmlInitWithFlags(unsigned flags) {
    rule_t *rule = find(-1, "!nvmlInitWithFlags", 0);
    (void)flags;
    num_calls++;
    if (rule) return (int)rule->value;
    opened++;
    return SUCCESS;
}

int nvmlShutdown(void) {
    if (!opened) return UNINITIALIZED;
    opened--;
    return SUCCESS;
}

const char *nvmlErrorString(int code) { (void)code; return "an error of the stub"; }

int nvmlSystemGetDriverVersion(char *text, unsigned size) {
    CHECK(NULL);
    snprintf(text, size, "570.1");
    return SUCCESS;
}

int nvmlDeviceGetCount_v2(unsigned *count) { CHECK(NULL); *count = num_devices; return SUCCESS; }

int nvmlDeviceGetHandleByIndex_v2(unsigned index, device_t *device) {
    if ((int)index >= num_devices) return INVALID_ARGUMENT;
    CHECK(&slots[index]);
    *device = &slots[index];
    return SUCCESS;
}

static void uuid_of(int index, char *text, unsigned size) {
    rule_t *rule = find(index, "uuid", 0);
    if (rule) snprintf(text, size, "%s", rule->text);
    else snprintf(text, size, "%s-%08x-0000-0000-0000-000000000000", index < 8 ? "GPU" : "MIG", index);
}

int nvmlDeviceGetHandleByUUID(const char *uuid, device_t *device) {
    char text[96];
    for (int i = 0; i < num_devices; i++) {
        uuid_of(i, text, sizeof text);
        if (strcmp(text, uuid)) continue;
        CHECK(&slots[i]);
        *device = &slots[i];
        return SUCCESS;
    }
    return NOT_FOUND;
}

int nvmlDeviceGetUUID(device_t device, char *text, unsigned size) {
    CHECK(device);
    uuid_of(device->index, text, size);
    return SUCCESS;
}

int nvmlDeviceGetName(device_t device, char *text, unsigned size) {
    rule_t *rule;
    CHECK(device);
    rule = find(device->index, "name", 0);
    snprintf(text, size, "%s", rule ? rule->text : device->index < 8 ? "Stub" : "Stub MIG 1g.10gb");
    return SUCCESS;
}

/* --- numbers ---------------------------------------------------------------------------------- */

int nvmlDeviceGetPowerUsage(device_t device, unsigned *out) { GET(out, unsigned, "power"); }
int nvmlDeviceGetEnforcedPowerLimit(device_t device, unsigned *out) { GET(out, unsigned, "limit"); }
int nvmlDeviceGetFanSpeed(device_t device, unsigned *out) { GET(out, unsigned, "fan"); }

int nvmlDeviceGetTotalEnergyConsumption(device_t device, unsigned long long *out) {
    GET(out, unsigned long long, "energy");
}

#ifndef NEW_DRIVER
int nvmlDeviceGetTemperature(device_t device, int sensor, unsigned *out) {
    if (sensor) return INVALID_ARGUMENT;
    GET(out, unsigned, "temperature");
}
#endif

typedef struct { unsigned version; int sensor; int temperature; } temperature_t;

int nvmlDeviceGetTemperatureV(device_t device, temperature_t *out) {
    if (out->version != 0x100000C || out->sensor) return INVALID_ARGUMENT;
    GET(&out->temperature, int, "temperature");
}

static const char *clock_name(int kind) { return kind == 1 ? "sm" : kind == 2 ? "mem" : "none"; }

int nvmlDeviceGetClockInfo(device_t device, int kind, unsigned *out) {
    GET(out, unsigned, clock_name(kind));
}

int nvmlDeviceGetMaxClockInfo(device_t device, int kind, unsigned *out) {
    GET(out, unsigned, kind == 1 ? "sm-max" : "none");
}

int nvmlDeviceGetTotalEccErrors(device_t device, int kind, int since, unsigned long long *out) {
    if (since) return INVALID_ARGUMENT;
    GET(out, unsigned long long, kind ? "uncorrected" : "corrected");
}

int nvmlDeviceGetUtilizationRates(device_t device, unsigned out[2]) {
    rule_t *busy, *memory;
    CHECK(device);
    busy = find(device->index, "busy", 0);
    memory = find(device->index, "memory-busy", 0);
    if (!busy || !memory) return NOT_SUPPORTED;
    out[0] = (unsigned)(long long)busy->value;
    out[1] = (unsigned)(long long)memory->value;
    return SUCCESS;
}

typedef struct { unsigned long long total, free, used; } memory_t;
typedef struct { unsigned version; unsigned long long total, reserved, free, used; } memory_v2_t;

static int memory_of(device_t device, memory_v2_t *out) {
    rule_t *total = find(device->index, "total", 0), *used = find(device->index, "used", 0);
    rule_t *reserved = find(device->index, "reserved", 0);
    if (!total || !used) return NOT_SUPPORTED;
    out->total = (unsigned long long)total->value;
    out->used = (unsigned long long)(long long)used->value;
    out->reserved = reserved ? (unsigned long long)reserved->value : 0;
    out->free = out->total - out->used - out->reserved;
    return SUCCESS;
}

int nvmlDeviceGetMemoryInfo(device_t device, memory_t *out) {
    memory_v2_t all;
    CHECK(device);
    if (memory_of(device, &all)) return NOT_SUPPORTED;
    out->total = all.total;
    out->free = all.free;
    out->used = all.used + all.reserved;
    return SUCCESS;
}

#ifndef OLD_DRIVER
int nvmlDeviceGetMemoryInfo_v2(device_t device, memory_v2_t *out) {
    CHECK(device);
    if (out->version != 0x02000028) return 25;
    return memory_of(device, out);
}

int nvmlDeviceGetCurrentClocksEventReasons(device_t device, unsigned long long *out) {
    GET(out, unsigned long long, "throttle");
}
#endif

#ifndef NEW_DRIVER
int nvmlDeviceGetCurrentClocksThrottleReasons(device_t device, unsigned long long *out) {
    GET(out, unsigned long long, "throttle");
}
#endif

/* --- numbered fields -------------------------------------------------------------------------- */

typedef union { double d; unsigned u; unsigned long ul; unsigned long long ull; long long ll; } value_t;
typedef struct {
    uint32_t id, scope;
    int64_t timestamp, latency;
    unsigned type;
    int code;
    value_t value;
} field_t;

int nvmlDeviceGetFieldValues(device_t device, int count, field_t *fields) {
    char key[32];
    CHECK(device);
    for (int i = 0; i < count; i++) {
        rule_t *rule;
        snprintf(key, sizeof key, "field %u", fields[i].id);
        fields[i].code = NOT_SUPPORTED;
        if (!(rule = find(device->index, key, fields[i].scope))) continue;
        fields[i].code = rule->type < 0 ? -rule->type : SUCCESS;
        fields[i].type = (unsigned)rule->type;
        if (rule->type == 0) fields[i].value.d = rule->value;
        else if (rule->type == 1) fields[i].value.u = (unsigned)(long long)rule->value;
        else fields[i].value.ull = (unsigned long long)(long long)rule->value;
    }
    return SUCCESS;
}

/* --- processes -------------------------------------------------------------------------------- */

typedef struct { unsigned pid; unsigned long long bytes; unsigned gpu, compute; } process_t;

static int list(device_t device, const char *kind, unsigned *count, process_t *out) {
    unsigned room = *count, found = 0;
    for (int i = 0; i < num_rules; i++) {
        if (rules[i].device != device->index || strcmp(rules[i].name, kind)) continue;
        if (found < room && out) {
            out[found].pid = (unsigned)rules[i].scope;
            out[found].bytes = strtoull(rules[i].text, NULL, 0);
            out[found].gpu = out[found].compute = 0xFFFFFFFFu;
        }
        found++;
    }
    *count = found;
    return found > room ? INSUFFICIENT_SIZE : SUCCESS;
}

#ifndef OLD_DRIVER
int nvmlDeviceGetComputeRunningProcesses_v3(device_t device, unsigned *count, process_t *out) {
    CHECK(device);
    return list(device, "compute", count, out);
}

int nvmlDeviceGetGraphicsRunningProcesses_v3(device_t device, unsigned *count, process_t *out) {
    CHECK(device);
    return list(device, "graphics", count, out);
}
#endif

int nvmlDeviceGetComputeRunningProcesses_v2(device_t device, unsigned *count, process_t *out) {
    CHECK(device);
    return list(device, "compute", count, out);
}

int nvmlDeviceGetGraphicsRunningProcesses_v2(device_t device, unsigned *count, process_t *out) {
    CHECK(device);
    return list(device, "graphics", count, out);
}

typedef struct { unsigned pid; unsigned long long time; unsigned sm, memory, enc, dec; } share_t;

int nvmlDeviceGetProcessUtilization(
    device_t device, share_t *out, unsigned *count, unsigned long long since) {
    unsigned room = *count, found = 0;
    unsigned long long now = 1000 + num_calls;
    CHECK(device);
    if (since > now) return NOT_FOUND;
    for (int i = 0; i < num_rules; i++) {
        if (rules[i].device != device->index || strcmp(rules[i].name, "compute")) continue;
        /* As real ones: several samples per process, the newest not last. */
        for (int age = 0; age < 2; age++, found++)
            if (out && found < room) {
                memset(&out[found], 0, sizeof *out);
                out[found].pid = (unsigned)rules[i].scope;
                out[found].time = now - age;
                out[found].sm = age ? 1 : (unsigned)rules[i].type;
            }
    }
    *count = found;
    return found > room ? INSUFFICIENT_SIZE : SUCCESS;
}

/* --- MIG -------------------------------------------------------------------------------------- */

int nvmlDeviceGetMigMode(device_t device, unsigned *current, unsigned *pending) {
    rule_t *rule;
    CHECK(device);
    if (!(rule = find(device->index, "mig", 0))) return NOT_SUPPORTED;
    *current = *pending = rule->value > 0;
    return SUCCESS;
}

int nvmlDeviceGetMaxMigDeviceCount(device_t device, unsigned *count) {
    CHECK(device);
    *count = 7;
    return SUCCESS;
}

int nvmlDeviceGetMigDeviceHandleByIndex(device_t device, unsigned index, device_t *instance) {
    rule_t *rule = find(device->index, "mig", 0);
    CHECK(device);
    if (!rule || index >= rule->value) return NOT_FOUND;
    *instance = &slots[device->index * 8 + 8 + index];
    return SUCCESS;
}

int nvmlDeviceGetGpuInstanceId(device_t device, unsigned *id) {
    CHECK(device);
    *id = 1 + device->index % 8;
    return SUCCESS;
}

int nvmlDeviceGetComputeInstanceId(device_t device, unsigned *id) {
    CHECK(device);
    *id = 0;
    return SUCCESS;
}

/* --- GPM -------------------------------------------------------------------------------------- */

#ifndef OLD_DRIVER
typedef struct { int device; int instance; int order; } sample_t;
typedef struct { unsigned metric; int code; double value; const char *info[3]; } metric_t;
typedef struct { unsigned version, count; sample_t *first, *second; metric_t metrics[]; } request_t;

static int order;

int nvmlGpmQueryDeviceSupport(device_t device, unsigned out[2]) {
    CHECK(device);
    out[1] = find(device->index, "gpm 2", 0) != NULL;
    return SUCCESS;
}

int nvmlGpmSampleAlloc(sample_t **sample) {
    CHECK(NULL);
    *sample = (sample_t *)calloc(1, sizeof **sample);
    num_samples++;
    return SUCCESS;
}

int nvmlGpmSampleFree(sample_t *sample) {
    CHECK(NULL);
    free(sample);
    num_samples--;
    return SUCCESS;
}

int nvmlGpmSampleGet(device_t device, sample_t *sample) {
    CHECK(device);
    sample->device = device->index;
    sample->instance = 0;
    sample->order = ++order;
    return SUCCESS;
}

int nvmlGpmMigSampleGet(device_t device, unsigned instance, sample_t *sample) {
    CHECK(device);
    sample->device = device->index;
    sample->instance = (int)instance;
    sample->order = ++order;
    return SUCCESS;
}

int nvmlGpmMetricsGet(request_t *request) {
    char key[32];
    CHECK(NULL);
    /* The first sample must be the older one, of the same device. */
    if (request->version != 1 || !request->first->order ||
        request->first->order >= request->second->order ||
        request->first->device != request->second->device)
        return INVALID_ARGUMENT;
    for (unsigned i = 0; i < request->count; i++) {
        metric_t *metric = &request->metrics[i];
        rule_t *rule;
        snprintf(key, sizeof key, "gpm %u", metric->metric);
        rule = find(request->first->device, key, 0);
        metric->code = rule ? SUCCESS : NOT_SUPPORTED;
        metric->value = rule ? rule->value + request->first->instance : 0;
    }
    return SUCCESS;
}
#endif
