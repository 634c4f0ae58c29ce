/* What the stub answers: a script, and what it has told so far.

   A script has one command per line; it comes from the variable NVML_STUB or from stub_script():

       devices N                    how many devices there are
       set DEVICE NAME VALUE        what a device answers (see the uses of GET in stub.c)
       name DEVICE TEXT             what a device is called
       uuid DEVICE TEXT             its identity
       fail DEVICE FUNCTION CODE    a function returns this code; * is any device, 0 heals it
       process DEVICE KIND PID BYTES SHARE   KIND is c (compute) or g (graphics)
       no-processes DEVICE
       field DEVICE ID SCOPE TYPE VALUE      a numbered field; SCOPE * is all links
       no-field DEVICE ID SCOPE
       gpm DEVICE METRIC VALUE
       mig DEVICE COUNT             divides a device; its instances are DEVICE * 8 + 8 + i */

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define NUM_SLOTS 80
#define NUM_RULES 512
#define SUCCESS 0
#define UNINITIALIZED 1
#define INVALID_ARGUMENT 2
#define NOT_SUPPORTED 3
#define NOT_FOUND 6
#define INSUFFICIENT_SIZE 7

typedef struct {
    int device;
    char name[100];
    char text[96];
    double value;
    unsigned long long scope;
    int type;
} rule_t;

typedef struct { int index; } slot_t;
typedef slot_t *device_t;

static slot_t slots[NUM_SLOTS];
static rule_t rules[NUM_RULES];
static int num_rules;
static int num_devices;
static int opened;
static int num_samples;
static unsigned long long num_calls;

static rule_t *find(int device, const char *name, unsigned long long scope) {
    for (int i = 0; i < num_rules; i++)
        if (rules[i].device == device && rules[i].scope == scope && !strcmp(rules[i].name, name))
            return &rules[i];
    return NULL;
}

static rule_t *make(int device, const char *name, unsigned long long scope) {
    rule_t *rule = find(device, name, scope);
    if (!rule) {
        if (num_rules == NUM_RULES) abort();
        rule = &rules[num_rules++];
        memset(rule, 0, sizeof *rule);
        rule->device = device;
        rule->scope = scope;
        snprintf(rule->name, sizeof rule->name, "%s", name);
    }
    return rule;
}

static void drop(int device, const char *name, unsigned long long scope) {
    rule_t *rule = find(device, name, scope);
    if (rule) *rule = rules[--num_rules];
}

static int index_of(const char *text) { return *text == '*' ? -1 : atoi(text); }

static void command(const char *line) {
    char verb[32] = "", a[64] = "", b[96] = "", c[64] = "", d[64] = "", e[64] = "", key[100];
    if (sscanf(line, "%31s %63s %95s %63s %63s %63s", verb, a, b, c, d, e) < 1) return;
    int device = index_of(a);
    unsigned long long scope = *c == '*' ? 0xFFFFFFFFu : strtoull(c, NULL, 0);
    if (!strcmp(verb, "devices")) {
        num_devices = device;
    } else if (!strcmp(verb, "set")) {
        make(device, b, 0)->value = strtod(c, NULL);
    } else if (!strcmp(verb, "name") || !strcmp(verb, "uuid")) {
        const char *text = strstr(line, a) + strlen(a);
        while (*text == ' ') text++;
        snprintf(make(device, verb, 0)->text, 96, "%s", text);
    } else if (!strcmp(verb, "fail")) {
        snprintf(key, sizeof key, "!%s", b);
        drop(device, key, 0);
        if (atoi(c)) make(device, key, 0)->value = atoi(c);
    } else if (!strcmp(verb, "process")) {
        rule_t *rule = make(device, *b == 'c' ? "compute" : "graphics", scope);
        rule->value = strtod(d, NULL);
        rule->type = atoi(e);
        snprintf(rule->text, sizeof rule->text, "%s", d);
    } else if (!strcmp(verb, "no-processes")) {
        for (int i = num_rules; i--;)
            if (rules[i].device == device &&
                (!strcmp(rules[i].name, "compute") || !strcmp(rules[i].name, "graphics")))
                rules[i] = rules[--num_rules];
    } else if (!strcmp(verb, "field") || !strcmp(verb, "no-field")) {
        snprintf(key, sizeof key, "field %d", atoi(b));
        drop(device, key, scope);
        if (*verb == 'f') {
            rule_t *rule = make(device, key, scope);
            rule->type = atoi(d);
            rule->value = strtod(e, NULL);
        }
    } else if (!strcmp(verb, "gpm")) {
        snprintf(key, sizeof key, "gpm %d", atoi(b));
        make(device, key, 0)->value = strtod(c, NULL);
    } else if (!strcmp(verb, "mig")) {
        make(device, "mig", 0)->value = atoi(b);
    } else {
        fprintf(stderr, "the stub does not know %s\n", line);
        abort();
    }
}

void stub_script(const char *text) {
    char line[256];
    while (*text) {
        size_t length = strcspn(text, "\n;");
        snprintf(line, sizeof line, "%.*s", (int)length, text);
        command(line);
        text += length + (text[length] != 0);
    }
}

void stub_reset(void) { num_rules = num_devices = opened = num_samples = 0; num_calls = 0; }
int stub_opened(void) { return opened; }
int stub_samples(void) { return num_samples; }
unsigned long long stub_calls(void) { return num_calls; }

__attribute__((constructor)) static void begin(void) {
    for (int i = 0; i < NUM_SLOTS; i++) slots[i].index = i;
    const char *script = getenv("NVML_STUB");
    if (script) stub_script(script);
}
