// Asks the server for samples, keeps those of the last while, and shows them.
// Text from outside only ever becomes the text of an element.

/* global uPlot */

const KEPT = 1800;
const TIMEOUT = 5000;
const NONE = "n/a";
/** Of lines, on light and on dark ground; what follows the last one is dashed. */
const COLORS = ["#3f8fe8", "#e0703a", "#22a06b", "#9b6bf2", "#c99700", "#d94f93", "#2fa7b8", "#8a9099"];
const CHARTS = {
  utilization: ["Utilization", "ratio"],
  memory_used: ["Memory in use", "bytes"],
  power: ["Power", "W"],
};

const find = (selector) => document.querySelector(selector);
const state = { about: null, points: [], sample: null, finished: false, span: 300 };
const charts = new Map();
let token = takeToken();
let timer = 0;
let heard = null;
let arrived = Date.now();

// --- numbers as text ---------------------------------------------------------------------------

function scaled(value, base, units) {
  let i = 0;
  for (; i + 1 < units.length && Math.abs(value) >= base * 0.9995; i += 1) value /= base;
  return `${i === 0 ? value.toFixed(0) : value.toPrecision(3)} ${units[i]}`;
}

function seconds(value) {
  if (value < 1e-3) return `${(value * 1e6).toFixed(0)} µs`;
  if (value < 1) return `${Number((value * 1e3).toPrecision(3))} ms`;
  if (value < 120) return `${Number(value.toPrecision(3))} s`;
  return value < 7200 ? `${(value / 60).toFixed(0)} min` : `${(value / 3600).toFixed(1)} h`;
}

const FORMATS = {
  ratio: (v) => `${(100 * v).toFixed(0)} %`,
  bytes: (v) => scaled(v, 1024, ["B", "KiB", "MiB", "GiB", "TiB"]),
  "bytes/s": (v) => scaled(v, 1000, ["B/s", "kB/s", "MB/s", "GB/s", "TB/s"]),
  W: (v) => `${v.toFixed(0)} W`,
  J: (v) => scaled(v, 1000, ["J", "kJ", "MJ", "GJ"]),
  C: (v) => `${v.toFixed(0)} °C`,
  Hz: (v) => scaled(v, 1000, ["Hz", "kHz", "MHz", "GHz"]),
  count: (v) => v.toLocaleString("en"),
  s: seconds,
  "1/s": (v) => `${v >= 100 ? v.toFixed(0) : v.toPrecision(3)} /s`,
};

function show(value, unit) {
  return value === null || value === undefined ? NONE : FORMATS[unit](value);
}

// --- elements ----------------------------------------------------------------------------------

function make(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

/** Set a text if it is another one, so that a selection stays. */
function write(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

function list(parent, items) {
  parent.replaceChildren(...items.map(([text, kind]) => make("li", { class: kind }, text)));
}

/** Fill a table with rows of texts below its titles. */
function fill(table, titles, rows) {
  if (table.tHead === null) {
    const heads = titles.map((title) => make("th", { scope: "col" }, title));
    table.append(make("thead", {}, make("tr", {}, ...heads)), make("tbody"));
  }
  const body = table.tBodies[0];
  while (body.rows.length > rows.length) body.deleteRow(-1);
  rows.forEach((cells, i) => {
    const row = body.rows[i] ?? body.insertRow();
    cells.forEach((text, j) => write(row.cells[j] ?? row.insertCell(), text));
  });
}

/** A bar of phases: each with its begin and end, as shares of the bar, and a text. */
function bar(name, parts) {
  const colors = new Map(state.about.phases.map(([phase, ...both]) => [phase, both]));
  const shown = parts.filter(([, begin, end]) => end - begin > 0.0005);
  const texts = shown.map(([phase, , , text]) => `${phase} ${text}`);
  const pieces = shown.map(([phase, begin, end, text], i) => {
    const piece = make("i", { title: texts[i] }, end - begin > 0.09 ? text : "");
    [piece.style.background, piece.style.color] = colors.get(phase);
    piece.style.left = `${100 * begin}%`;
    piece.style.width = `${100 * (end - begin)}%`;
    return piece;
  });
  const label = `${name}: ${texts.join(", ")}`;
  const head = make("p", {}, name);
  return make("div", { class: "replica" }, head, make("div", { class: "bar", role: "img", "aria-label": label }, ...pieces));
}

/** Lines over time, by name; they share the pointer and what a drag looks at. */
function chart(parent, title, unit, times, lines) {
  const known = Object.entries(lines).filter(([, values]) => values.some((value) => value !== null));
  const names = JSON.stringify(known.map(([name]) => name));
  const key = parent.parentNode.id + title;
  let one = charts.get(key);
  if (one !== undefined && one.names !== names) {
    one.element.remove();
    one.plot.destroy();
    charts.delete(key);
    one = undefined;
  }
  if (known.length === 0) return;
  if (one === undefined) {
    const place = make("div");
    const element = make("figure", { "aria-label": title }, make("figcaption", {}, title), place);
    parent.append(element);
    const soft = () => getComputedStyle(element.firstChild).color;
    const axis = { stroke: soft, grid: { stroke: "#8883", width: 1 }, ticks: { show: false } };
    const steps = unit === "bytes" ? { incrs: Array.from({ length: 50 }, (_, i) => 2 ** i) } : {};
    one = { element, names, isZoomed: false };
    one.plot = new uPlot(
      {
        width: place.clientWidth || 300,
        height: 150,
        cursor: { sync: { key: "time" }, y: false },
        scales: { y: { range: (plot, low, high) => [0, (unit === "ratio" ? 1 : high * 1.1) || 1] } },
        axes: [
          { ...axis, space: 80, size: 28, values: (plot, ticks) => ticks.map((v) => clock(v)) },
          { ...axis, space: 24, size: 70, ...steps, values: (plot, ticks) => ticks.map((v) => show(v, unit)) },
        ],
        series: [
          { label: "Time", value: (plot, v) => (v === null ? "" : clock(v)) },
          ...known.map(([name], i) => ({
            label: name,
            stroke: COLORS[i % COLORS.length],
            dash: i < COLORS.length ? [] : [6, 4],
            width: 1.5,
            value: (plot, v) => show(v, unit),
          })),
        ],
        hooks: { setSelect: [(plot) => (one.isZoomed ||= plot.select.width > 0)] },
      },
      [[], ...known.map(() => [])],
      place,
    );
    one.plot.over.addEventListener("dblclick", () => (one.isZoomed = false));
    new ResizeObserver(() => one.plot.setSize({ width: place.clientWidth, height: 150 })).observe(place);
    charts.set(key, one);
  }
  if (one.isZoomed) return;
  one.plot.setData([times, ...known.map(([, values]) => values)]);
  // Without a pointer the legend tells the latest.
  const tellLatest = () => one.plot.cursor.left < 0 && one.plot.setLegend({ idx: times.length - 1 });
  // The plot takes its data in a task of its own.
  queueMicrotask(tellLatest);
}

function clock(time) {
  return new Date(1000 * time).toLocaleTimeString("en-GB");
}

// --- what is shown -----------------------------------------------------------------------------

/** The points of the time shown; one without values in each gap, so that the line breaks. */
function shownPoints() {
  const begin = state.points.at(-1).time - state.span;
  const found = [];
  for (const point of state.points.filter((one) => one.time >= begin)) {
    const before = found.at(-1);
    if (before !== undefined && point.time - before.time > 5 * state.about.interval) {
      found.push({ time: (before.time + point.time) / 2, devices: {} });
    }
    found.push(point);
  }
  return found;
}

function render() {
  const { about, sample } = state;
  if (sample === null || state.points.length === 0) return;
  const points = shownPoints();
  list(find("#alerts"), sample.alerts.map((one) => [one.text, one.severity]));
  list(find("#notes"), sample.notes.map((text) => [text, ""]));
  showRun(sample, points);
  showDevices(sample, points);
  showProcesses(sample.processes);
  const { host } = sample;
  write(find("#host"), host === null ? "" : describeHost(host));
  write(find("#cost"), `A sample each ${seconds(about.interval)}; the last one took ${seconds(sample.cost)}`);
}

function describeHost(host) {
  const memory = `${show(host.memory_used, "bytes")} of ${show(host.memory_total, "bytes")}`;
  const threads = Object.entries(host.threads).sort((a, b) => b[1] - a[1]).slice(0, 8);
  const busy = threads.map(([name, use]) => `${name} ${show(use, "ratio")}`).join(", ");
  const processors = `${show(host.utilization, "ratio")} of ${host.num_cpus} processors`;
  return `Host: ${processors}, ${memory}${busy && `. Threads of the run: ${busy}`}`;
}

function showRun(sample, points) {
  const { run } = sample;
  find("#run").hidden = run === null;
  if (run === null) return;
  const { info, last } = run;
  const rank = info.world_size > 1 ? `, rank ${run.rank} of ${info.world_size}` : "";
  const gone = sample.gone === null ? "" : `, gone for ${seconds(sample.gone)}`;
  const steps = run.num_steps.toLocaleString("en");
  write(find("#run h2 small"), `${info.wrapper}(${info.model}), process ${run.pid}${rank}, step ${steps}${gone}`);
  find("#run").classList.toggle("past", sample.gone !== null);
  const times = points.map((point) => point.time);
  const column = (name) => ({ "the run": points.map((point) => point[name] ?? null) });
  chart(find("#run .charts"), "Samples per second", "1/s", times, column("speed"));
  chart(find("#run .charts"), "Time of a step", "s", times, column("step"));
  const shares = info.devices.map((device, i) => {
    const [phase, since] = run.now[i] ?? ["idle", 0];
    const now = sample.gone === null ? `, now ${phase}${since >= 1 ? ` for ${seconds(since)}` : ""}` : "";
    const speed = sample.scores[i] == null ? "" : `, speed ${show(sample.scores[i], "ratio")} of the fastest`;
    let end = 0;
    const parts = state.about.phases.map(([name]) => {
      const share = sample.shares[i]?.[name] ?? 0;
      end += share;
      return [name, end - share, end, show(share, "ratio")];
    });
    return bar(`replica ${i} on ${device}${now}${speed}`, parts);
  });
  find("#shares").replaceChildren(...shares);
  if (last !== null) {
    const ends = last.replicas.map((replica) => replica.segments.at(-1)?.end ?? 0);
    // On an accelerator a replica may end later than the host.
    const length = Math.max(last.seconds, ...ends, 1e-9);
    write(find("#last").previousElementSibling.lastChild, `${last.number}, ${last.kind}, ${last.samples} samples, ${seconds(length)}`);
    const rows = last.replicas.map((replica) => {
      const parts = replica.segments.map((one) => [one.phase, one.begin / length, one.end / length, seconds(one.end - one.begin)]);
      return bar(`replica ${replica.index} on ${replica.device}, ${replica.samples} samples`, parts);
    });
    find("#last").replaceChildren(...rows);
  }
  const swatches = state.about.phases.map(([name, color]) => {
    const swatch = make("i");
    swatch.style.background = color;
    return make("li", {}, swatch, name);
  });
  find("#phases").replaceChildren(...swatches);
}

function showDevices(sample, points) {
  const { devices, run } = sample;
  const times = points.map((point) => point.time);
  state.about.charted.forEach((metric, i) => {
    const line = ({ device }) => [device, points.map((point) => point.devices[device]?.[i] ?? null)];
    chart(find("#devices .charts"), ...CHARTS[metric], times, Object.fromEntries(devices.map(line)));
  });
  const of = (value, whole, unit) => show(value, unit) + (whole == null ? "" : ` of ${show(whole, unit)}`);
  const told = new Set(["utilization", "memory_used", "memory_free", "memory_total", "power", "power_limit", "temperature"]);
  const rows = devices.map(({ device, name, uuid, values, throttle, parent, error }) => {
    const replicas = (run?.info.devices ?? []).flatMap((own, i) => {
      const known = run.info.uuids[i];
      return (known === null || uuid === null ? own === device : known === uuid) ? [i] : [];
    });
    const facts = [
      error,
      throttle.length ? `slowed down: ${throttle.join(", ")}` : null,
      parent === null ? null : `part of ${parent}`,
      replicas.length ? `replica ${replicas.join(", ")}` : null,
    ];
    const more = state.about.metrics.filter(([metric]) => !told.has(metric) && values[metric] != null);
    return [
      device,
      name,
      show(values.utilization, "ratio"),
      of(values.memory_used, values.memory_total, "bytes"),
      of(values.power, values.power_limit, "W"),
      show(values.temperature, "C"),
      facts.filter((fact) => fact !== null).join("; "),
      more.map(([metric, unit]) => `${metric.replaceAll("_", " ")} ${show(values[metric], unit)}`).join(", "),
    ];
  });
  fill(find("#devices .table table"), ["Device", "Name", "Use", "Memory", "Power", "Temperature", "State", "More"], rows);
}

function showProcesses(processes) {
  find("#processes").hidden = processes.length === 0;
  const titles = ["Device", "PID", "Process", "User", "Device memory", "Device use", "CPU", "Host memory"];
  const rows = processes.map((one) => [
    one.device,
    String(one.pid),
    one.name ?? NONE,
    one.user ?? NONE,
    show(one.memory, "bytes"),
    show(one.utilization, "ratio"),
    show(one.cpu, "ratio"),
    show(one.host_memory, "bytes"),
  ]);
  fill(find("#processes .table table"), titles, rows);
}

// --- the server --------------------------------------------------------------------------------

/** The token of the address, which then shows it no more; or that of before. */
function takeToken() {
  const address = new URL(location.href);
  const given = address.searchParams.get("token");
  if (given !== null) {
    sessionStorage.setItem("token", given);
    address.searchParams.delete("token");
    history.replaceState(null, "", address);
  }
  return sessionStorage.getItem("token");
}

class NeedsToken extends Error {}

async function get(path) {
  // Bytes of UTF-8, one per letter, since a header holds no others.
  const bytes = token === null ? [] : new TextEncoder().encode(token);
  const headers = token === null ? {} : { Authorization: `Bearer ${String.fromCharCode(...bytes)}` };
  const answer = await fetch(path, { headers, signal: AbortSignal.timeout(TIMEOUT), cache: "no-store" });
  if (answer.status === 401) throw new NeedsToken();
  if (!answer.ok) throw new Error(`${answer.status} ${answer.statusText}`);
  return answer.json();
}

async function poll() {
  clearTimeout(timer);
  let pause = 2000;
  try {
    state.about ??= await get("api/about");
    const { points, sample, finished } = await get(`api/samples?after=${state.points.at(-1)?.time ?? 0}`);
    heard = Date.now();
    find("#ask").hidden = true;
    pause = Math.min(5000, Math.max(250, 1000 * state.about.interval));
    if (sample !== null && sample.time < (state.points.at(-1)?.time ?? 0)) {
      // Another server, which plays back an older recording: all of it anew.
      Object.assign(state, { about: null, points: [] });
      pause = 0;
    } else {
      if (points.length) arrived = Date.now();
      const isNew = points.length > 0 || state.sample === null;
      state.points = [...state.points, ...points].slice(-KEPT);
      Object.assign(state, { sample, finished });
      if (isNew && !document.hidden) render();
      tellProgress();
    }
  } catch (error) {
    if (error instanceof NeedsToken) {
      tell("gone", "token needed", token === null ? "" : "This is not the token of the server.");
      find("#ask").hidden = false;
      find("#token").focus();
      return;
    }
    const since = heard === null ? "" : ` for ${seconds(Math.ceil((Date.now() - heard) / 1000))}`;
    const alarm = `The server has not answered${since}. Is "dataparallel monitor serve" running? Trying again.`;
    tell("gone", "not connected", alarm);
    console.info(error);
    // Another one may answer next.
    state.about = null;
  }
  timer = setTimeout(poll, pause);
}

function tell(kind, text, alarm = "") {
  find("#status").className = kind;
  write(find("#status"), text);
  find("#alarm").hidden = alarm === "";
  write(find("#alarm"), alarm);
}

function tellProgress() {
  const silence = (Date.now() - arrived) / 1000;
  if (state.finished) {
    tell("done", "end of the recording");
  } else if (state.sample === null) {
    tell("live", "waiting for the first sample");
  } else if (silence > Math.max(10, 5 * state.about.interval)) {
    const alarm = `The server has had no sample for ${seconds(Math.ceil(silence))}: a device or its driver may hang.`;
    tell("gone", "no samples", alarm);
  } else {
    tell("live", `live, ${clock(state.sample.time)}`);
  }
}

find("#ask").addEventListener("submit", (event) => {
  event.preventDefault();
  token = find("#token").value;
  sessionStorage.setItem("token", token);
  find("#token").value = "";
  poll();
});

find("#window").addEventListener("change", (event) => {
  state.span = Number(event.target.value);
  render();
});

document.addEventListener("visibilitychange", () => {
  if (document.hidden || !find("#ask").hidden) return;
  render();
  poll();
});

poll();
