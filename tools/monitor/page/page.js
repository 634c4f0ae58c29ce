// The monitor's page. It asks the server for samples, keeps the latest, and shows them. Text from
// outside only ever becomes the text of an element.

/* global uPlot */

const KEPT = 1800;
const TIMEOUT = 5000;
const NONE = "n/a";
/** So many alerts are seen at once; the others unfold. */
const MOST_ALERTS = 3;
/** The charts of each device: metric, title, unit, and the metric that says how much there can be. */
const CHARTS = {
  utilization: ["Utilization", "ratio"],
  memory_used: ["Memory", "bytes", "memory_total"],
  power: ["Power", "W", "power_limit"],
};

const find = (selector) => document.querySelector(selector);
const state = { about: null, points: [], sample: null, finished: false, span: 300 };
/** The charts by key, for each element that holds some. */
const charts = new WeakMap();
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
  if (value === 0) return "0 s";
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
  "samples/s": (v) => `${v >= 100 ? Math.round(v).toLocaleString("en") : Number(v.toPrecision(3))} samples/s`,
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

/** Set a text if it differs, so that a selection stays. */
function write(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

function list(parent, items) {
  parent.replaceChildren(...items.map(([text, kind]) => make("li", { class: kind }, text)));
}

/** Return an element's children by their keys, in this order; makes new ones, and removes others. */
function keyed(parent, keys, create) {
  const old = new Map([...parent.children].map((child) => [child.dataset.key, child]));
  const now = keys.map((key) => {
    const child = old.get(key) ?? create();
    child.dataset.key = key;
    old.delete(key);
    return child;
  });
  for (const child of old.values()) child.remove();
  // A child in its place stays there, and keeps the focus.
  now.forEach((child, i) => parent.children[i] === child || parent.insertBefore(child, parent.children[i] ?? null));
  return now;
}

/** Fill a table with rows of texts below its titles; a pair is a text and its long form. */
function fill(table, titles, rows) {
  if (table.tHead === null) {
    const heads = titles.map((title) => make("th", { scope: "col" }, title));
    table.append(make("thead", {}, make("tr", {}, ...heads)), make("tbody"));
  }
  const body = table.tBodies[0];
  while (body.rows.length > rows.length) body.deleteRow(-1);
  rows.forEach((cells, i) => {
    const row = body.rows[i] ?? body.insertRow();
    cells.forEach((cell, j) => {
      const [text, title] = [cell].flat();
      const place = row.cells[j] ?? row.insertCell();
      write(place.firstElementChild ?? place.appendChild(make("div")), text);
      place.title = title ?? "";
    });
  });
}

/** Fill an element that can be opened with names and values; it hides if there are none. */
function define(details, pairs) {
  details.hidden = pairs.length === 0;
  const now = pairs.flatMap(([key, value]) => [make("dt", {}, key), make("dd", {}, value)]);
  details.querySelector("dl").replaceChildren(...now);
}

/** Make a bar of phases, each with its begin and end, as shares of the bar, and a text. */
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
  return [make("p", {}, name), make("div", { class: "bar", role: "img", "aria-label": label }, ...pieces)];
}

/** Draw a line over time, with its latest value above; all share the pointer. A small one has no axes. */
function chart(parent, key, title, unit, times, values, { whole = null, isSmall = false } = {}) {
  const known = charts.get(parent) ?? new Map();
  charts.set(parent, known);
  // The title may change, as when more ranks come.
  if (!known.has(key)) known.set(key, addChart(parent, unit, isSmall));
  const one = known.get(key);
  one.whole = whole;
  one.element.hidden = values.every((value) => value === null);
  write(one.title, title);
  if (!one.isZoomed) one.plot.setData([times, values]);
  return one.element;
}

function addChart(parent, unit, isSmall) {
  const [title, value, rest] = [make("span"), make("b"), make("span")];
  const place = make("div", { class: "plot" });
  const caption = make("figcaption", {}, title, " ", value, " ", rest);
  const element = make("figure", { tabindex: "0" }, caption, place);
  parent.append(element);
  const height = isSmall ? 34 : 130;
  const axis = { stroke: () => getComputedStyle(caption).color, grid: { stroke: "#8883", width: 1 }, ticks: { show: false } };
  const one = { element, title, whole: null, isZoomed: false };
  const tell = (plot) => {
    const at = plot.cursor.idx;
    write(value, show(plot.data[1][at ?? plot.data[0].length - 1], unit));
    write(rest, at != null ? `at ${clock(plot.data[0][at])}` : one.whole === null ? "" : `of ${show(one.whole, unit)}`);
  };
  const top = (high) => (unit === "ratio" ? 1 : Math.max(one.whole ?? high * 1.1, high) || 1);
  one.plot = new uPlot(
    {
      width: place.clientWidth || 300,
      height,
      padding: isSmall ? [2, 0, 2, 0] : [10, 26, 0, 0],
      legend: { show: false },
      cursor: { sync: { key: "time" }, y: false },
      scales: { y: { range: (plot, low, high) => [0, top(high)] } },
      axes: [
        { ...axis, show: !isSmall, space: 80, size: 22, values: (plot, ticks) => ticks.map((v) => clock(v)) },
        { ...axis, show: !isSmall, space: 30, size: 62, values: (plot, ticks) => ticks.map((v) => show(v, unit).replace(" samples/s", "")) },
      ],
      series: [{}, { stroke: () => getComputedStyle(place).color, fill: "#4fa3ff33", width: 1.5, points: { show: false } }],
      hooks: {
        setSelect: [(plot) => (one.isZoomed ||= plot.select.width > 0)],
        setCursor: [tell],
        setData: [tell],
      },
    },
    [[], []],
    place,
  );
  const release = () => {
    one.isZoomed = false;
    one.plot.setCursor({ left: -10, top: -10 });
  };
  one.plot.over.addEventListener("dblclick", release);
  element.addEventListener("keydown", ({ key }) => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[key];
    if (key === "Escape") release();
    if (step === undefined) return;
    const { plot } = one;
    const at = (plot.cursor.idx ?? plot.data[0].length - 1) + step;
    const x = plot.data[0][Math.max(0, Math.min(at, plot.data[0].length - 1))];
    one.isZoomed = true;
    plot.setCursor({ left: plot.valToPos(x, "x"), top: 1 });
  });
  // A hidden one has no width.
  new ResizeObserver(() => place.clientWidth && one.plot.setSize({ width: place.clientWidth, height })).observe(place);
  return one;
}

function clock(time) {
  return new Date(1000 * time).toLocaleTimeString("en-GB");
}

// --- what is shown -----------------------------------------------------------------------------

/** Return the points of the time shown, and one without values in each gap, so that the line breaks. */
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
  find("#advice").hidden = sample.advice === null;
  write(find("#advice span"), sample.advice ?? "");
  const others = sample.alerts.filter((one) => !sample.advice?.startsWith(one.text));
  const alerts = others.map((one) => [one.text, one.severity]);
  list(find("#alerts"), alerts.slice(0, MOST_ALERTS));
  list(find("#more ul"), alerts.slice(MOST_ALERTS));
  find("#more").hidden = alerts.length <= MOST_ALERTS;
  write(find("#more summary"), `${alerts.length - MOST_ALERTS} more`);
  list(find("#notes"), sample.notes.map((text) => [text, ""]));
  showJobs(sample, points);
  showDevices(sample, points);
  showProcesses(sample.processes);
  const { host } = sample;
  write(find("#host p"), host === null ? "" : describeHost(host));
  const threads = Object.entries(host?.threads ?? {}).sort(([a], [b]) => a.localeCompare(b, "en", { numeric: true }));
  define(find("#host details"), threads.map(([name, use]) => [name, show(use, "ratio")]));
  write(find("#cost"), `A sample each ${seconds(about.interval)}; the last one took ${seconds(sample.cost)}`);
}

function describeHost(host) {
  const of = (used, total) => `${show(used, "bytes")} of ${show(total, "bytes")}`;
  const facts = [`${show(host.utilization, "ratio")} of ${host.num_cpus} processors`, of(host.memory_used, host.memory_total)];
  if (host.swap_used) facts.push(`swap ${of(host.swap_used, host.swap_total)}`);
  if (host.load) facts.push(`load ${host.load.map((one) => one.toFixed(1)).join(", ")}`);
  return `Host: ${facts.join(", ")}`;
}

/** Show a section for each job, with all ranks that are seen from here. */
function showJobs(sample, points) {
  const jobs = new Map();
  for (const run of sample.runs) jobs.set(run.state.job, [...(jobs.get(run.state.job) ?? []), run]);
  const sections = keyed(find("#jobs"), [...jobs.keys()], () => find("#job").content.firstElementChild.cloneNode(true));
  const times = points.map((point) => point.time);
  [...jobs.values()].forEach((runs, i) => {
    const one = (selector) => sections[i].querySelector(selector);
    const [{ state: first }] = runs;
    const { info } = first;
    const ranks = new Set(runs.map((run) => run.state.rank));
    const isGone = runs.every((run) => run.gone !== null);
    const facts = [
      info.wrapper,
      info.world_size === 1 ? `process ${first.pid}` : `${ranks.size === info.world_size ? "" : `${ranks.size} of `}${info.world_size} ranks`,
      `step ${Math.max(...runs.map((run) => run.steps)).toLocaleString("en")}`,
      ...placesOf(runs.map((run) => run.state.info)),
      ...(isGone ? [`gone for ${seconds(runs[0].gone)}`] : []),
    ];
    write(one("h2 span"), [...new Set(runs.map((run) => run.state.info.model))].join(" and "));
    write(one("h2 small"), facts.join(", "));
    sections[i].classList.toggle("past", isGone);
    const course = (j) => points.map((point) => point.jobs?.[first.job]?.[j] ?? null);
    const [all, slowest] = ranks.size > 1 ? [", all ranks", ", slowest rank"] : ["", ""];
    const place = one(".charts");
    chart(place, "speed", `Throughput${all}`, "samples/s", times, course(0));
    chart(place, "step", `Step${slowest}`, "s", times, course(1));
    one(".shares").replaceChildren(...runs.map((run) => sharesOf(run)));
    const lasts = runs.filter((run) => run.state.last !== null);
    one(".last").replaceChildren(...lasts.map((run) => lastOf(run, runs)));
    if (lasts.length) {
      const { number, kind } = lasts[0].state.last;
      const samples = lasts.reduce((sum, run) => sum + run.state.last.samples, 0);
      write(one("h3 small"), `${number.toLocaleString("en")}, ${kind}, ${samples.toLocaleString("en")} samples`);
    }
    const occurring = new Set(runs.flatMap((run) => run.shares.flatMap((shares) => Object.keys(shares))));
    const swatches = state.about.phases.filter(([name]) => occurring.has(name)).map(([name, color]) => {
      const swatch = make("i");
      swatch.style.background = color;
      return make("li", {}, swatch, name);
    });
    one(".phases").replaceChildren(...swatches);
  });
}

/** Return in words where processes run in a cluster. */
function placesOf(processes) {
  const names = { slurm_job: "Slurm job", pod: "pod", pod_uid: "pod", container: "container" };
  return Object.entries(names).flatMap(([label, name]) => {
    const found = [...new Set(processes.map((one) => one.labels[label]).filter(Boolean))];
    return found.length ? [`${name} ${found.slice(0, 3).join(", ")}${found.length > 3 ? " …" : ""}`] : [];
  });
}

/** Return a rank's bars, below its name if there are several ranks. */
function rankOf(run, more, bars) {
  const note = state.sample.slow[run.state.job] === run.state.rank ? " the slowest" : "";
  const name = `${run.name.charAt(0).toUpperCase()}${run.name.slice(1)}`;
  const head = name ? [make("div", {}, name, make("b", {}, note), make("small", {}, more))] : [];
  return make("div", { class: note && "slow" ? "rank slow" : "rank" }, ...head, ...bars.flat());
}

function sharesOf(run) {
  const bars = run.state.info.devices.map((device, i) => {
    const [phase, since] = run.state.now[i] ?? ["idle", 0];
    const now = run.gone === null ? `, now ${phase}${since >= 1 ? ` for ${seconds(since)}` : ""}` : "";
    const speed = (run.scores[i] ?? 1) > 0.95 ? "" : `, speed ${show(run.scores[i], "ratio")} of the fastest`;
    let end = 0;
    const parts = state.about.phases.map(([name]) => {
      const share = run.shares[i]?.[name] ?? 0;
      end += share;
      return [name, end - share, end, show(share, "ratio")];
    });
    return bar(`replica ${i} on ${device}${now}${speed}`, parts);
  });
  const gone = run.gone === null ? "" : `, gone for ${seconds(run.gone)}`;
  return rankOf(run, ` process ${run.state.pid}${gone}`, bars);
}

function lastOf(run, runs) {
  const { last } = run.state;
  // All ranks have one scale. On an accelerator a replica may end later than the host.
  const ends = runs.flatMap(({ state: { last: one } }) => [one?.seconds ?? 0, ...(one?.replicas ?? []).map((replica) => replica.segments.at(-1)?.end ?? 0)]);
  const length = Math.max(...ends, 1e-9);
  const bars = last.replicas.map((replica) => {
    const parts = replica.segments.map((one) => [one.phase, one.begin / length, one.end / length, seconds(one.end - one.begin)]);
    return bar(`replica ${replica.index} on ${replica.device}, ${replica.samples} samples`, parts);
  });
  return rankOf(run, ` ${seconds(last.seconds)}`, bars);
}

/** Show a row for each device, so that equal ones do not hide each other. */
function showDevices(sample, points) {
  const { devices, versions } = sample;
  write(find("#devices h2 small"), Object.entries(versions).map((one) => one.join(" ")).join(", "));
  const times = points.map((point) => point.time);
  const { charted } = state.about;
  const shown = charted.filter((metric) => devices.some((one) => one.values[metric] != null));
  const parent = find("#devices .rows");
  parent.style.setProperty("--charts", shown.length);
  const rows = keyed(parent, devices.map(({ device, uuid }) => uuid ?? device), () => {
    const more = make("details", {}, make("summary", {}, "more"), make("dl"));
    return make("div", { class: "device" }, make("div", {}, make("b"), make("p"), make("p", { class: "trouble" }), more));
  });
  devices.forEach((one, i) => {
    const { device, name, uuid, values, throttle, parent: whole, error } = one;
    const text = (selector, ...parts) => write(rows[i].querySelector(selector), parts.filter(Boolean).join(", "));
    text("b", device);
    text("p", name, whole && `part of ${whole}`, values.temperature != null && show(values.temperature, "C"), sample.users[device]);
    text(".trouble", error, throttle.length && `slowed down: ${throttle.join(", ")}`);
    rows[i].querySelector(".trouble").className = `trouble ${error === null ? "warning" : "error"}`;
    charted.forEach((metric, j) => {
      const [title, unit, limit] = CHARTS[metric];
      const course = points.map((point) => point.devices[uuid ?? device]?.[j] ?? null);
      const figure = chart(rows[i], metric, title, unit, times, course, { whole: values[limit] ?? null, isSmall: true });
      // Those of one metric stand below each other, also if a device has not all of them.
      figure.style.setProperty("--place", shown.indexOf(metric) + 1);
    });
    const told = new Set([...charted, "memory_total", "power_limit", "temperature"]);
    const more = state.about.metrics.filter(([metric]) => !told.has(metric) && values[metric] != null);
    const facts = more.map(([metric, unit, meaning]) => [meaning, show(values[metric], unit)]);
    if (uuid !== null) facts.push(["identity", uuid]);
    define(rows[i].querySelector("details"), facts);
  });
}

function showProcesses(processes) {
  find("#processes").hidden = processes.length === 0;
  const titles = ["Device", "PID", "Process", "User", "Device memory", "Utilization", "CPU", "Host memory"];
  const rows = processes.map((one) => [
    one.device,
    String(one.pid),
    [one.command ?? one.name ?? NONE, [one.command ?? "", ...placesOf([one])].join("\n").trim()],
    one.user ?? NONE,
    show(one.memory, "bytes"),
    show(one.utilization, "ratio"),
    show(one.cpu, "ratio"),
    show(one.host_memory, "bytes"),
  ]);
  fill(find("#processes .table table"), titles, rows);
}

// --- the server --------------------------------------------------------------------------------

/** Return the token, and remove it from the address; without one there, the token of before. */
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
      // Another server plays back an older recording: everything starts anew.
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
