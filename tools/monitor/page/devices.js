// A card per device, and one for the host.

import { TimeChart, view } from "./charts.js";
import { label, make, seconds, show, sync, write } from "./text.js";

/** What a chart shows already. */
const SHOWN = new Set(["utilization", "memory_used", "memory_free", "memory_total", "power", "power_limit"]);
/** Metrics that are shown together: the label, the metrics, and what is around them. */
const TOGETHER = [
  ["Clock", ["sm_clock", "sm_clock_max"], (now, most) => `${now} of ${most}`],
  ["PCIe", ["pcie_sent", "pcie_received"], (sent, received) => `↑ ${sent}  ↓ ${received}`],
  ["NVLink", ["nvlink_sent", "nvlink_received"], (sent, received) => `↑ ${sent}  ↓ ${received}`],
  ["ECC", ["ecc_corrected", "ecc_uncorrected"], (mild, bad) => `${mild} fixed, ${bad} not`],
];
const COLORS = { utilization: "var(--use)", memory_used: "var(--memory)", power: "var(--power)" };
const NAMES = { utilization: "Utilization", memory_used: "Memory", power: "Power" };
const UNITS = { utilization: "ratio", memory_used: "bytes", power: "W" };

function card(subject, metrics) {
  const element = make("article", { class: "card", "aria-label": subject });
  const parts = {
    title: make("h3"),
    name: make("p", { class: "name" }),
    badges: make("ul", { class: "badges" }),
    charts: new Map(),
    begin: make("span"),
    facts: make("dl"),
  };
  element.append(make("div", { class: "title" }, parts.title, parts.badges), parts.name);
  for (const metric of metrics) {
    const chart = new TimeChart(NAMES[metric], UNITS[metric], subject, COLORS[metric]);
    parts.charts.set(metric, chart);
    element.append(chart.element);
  }
  const axis = make("div", { class: "axis", "aria-hidden": "true" }, parts.begin, make("span", {}, "now"));
  element.append(axis, parts.facts);
  element.parts = parts;
  return element;
}

/** Show a card per device. */
export function showDevices(section, about, sample, points) {
  write(section.querySelector(".facts"), sum(sample.devices));
  sync(
    section.querySelector(".cards"),
    inOrder(sample.devices),
    (device) => device.device,
    (device) => card(device.device, about.charted),
    (element, device) => showDevice(element, device, about, sample, points),
  );
}

/** All devices in one line. */
function sum(devices) {
  // Parts of a device are counted with it.
  const whole = devices.filter((device) => device.parent === null);
  const known = (metric) => whole.map((device) => device.values[metric]).filter((v) => v != null);
  const add = (values) => values.reduce((a, b) => a + b, 0);
  const facts = [`${whole.length} device${whole.length === 1 ? "" : "s"}`];
  const use = known("utilization");
  if (use.length) facts.push(`${show(add(use) / use.length, "ratio")} in use`);
  const [used, total] = [known("memory_used"), known("memory_total")];
  if (used.length && total.length === used.length) {
    facts.push(`${show(add(used), "bytes")} of ${show(add(total), "bytes")}`);
  }
  const power = known("power");
  if (power.length) facts.push(show(add(power), "W"));
  return facts.join("  ·  ");
}

function showDevice(element, device, about, sample, points) {
  const { parts } = element;
  const values = device.values;
  write(parts.title, device.device);
  write(parts.name, [device.name, shortened(device.uuid)].filter(Boolean).join("  ·  "));
  parts.name.title = device.uuid ?? "";
  element.classList.toggle("lost", device.error !== null);
  sync(
    parts.badges,
    badges(device, sample.run),
    (badge) => badge.kind + badge.text,
    (badge) => make("li", { class: badge.kind }, badge.text),
    () => {},
  );
  const limits = { utilization: 1, memory_used: values.memory_total, power: values.power_limit };
  about.charted.forEach((metric, i) => {
    const series = points.map((point) => [point.elapsed, point.devices[device.device]?.[i] ?? null]);
    const limit = limits[metric] ?? null;
    const beside = metric !== "utilization" && limit !== null ? `of ${show(limit, UNITS[metric])}` : "";
    parts.charts.get(metric).set(series, limit, beside);
  });
  write(parts.begin, `${seconds(view.end - view.begin)} ago`);
  sync(
    parts.facts,
    facts(about.metrics, values),
    (fact) => fact.name,
    (fact) => make("div", { title: fact.meaning }, make("dt", {}, fact.name), make("dd")),
    (entry, fact) => write(entry.lastChild, fact.text),
  );
}

function shortened(uuid) {
  return uuid !== null && uuid.length > 16 ? `${uuid.slice(0, 12)}…` : uuid;
}

/** What is known of a device beside its charts. */
function facts(metrics, values) {
  const known = new Map(
    metrics.filter(({ name }) => values[name] != null).map((metric) => [metric.name, metric]),
  );
  const text = (name) => show(values[name], known.get(name).unit);
  const done = new Set(SHOWN);
  const found = [];
  for (const [name, metric] of known) {
    if (done.has(name)) continue;
    const pair = TOGETHER.find(([, names]) => names.includes(name) && names.every((one) => known.has(one)));
    const names = pair?.[1] ?? [name];
    names.forEach((one) => done.add(one));
    found.push({
      name: pair?.[0] ?? label(name),
      text: pair === undefined ? text(name) : pair[2](...names.map(text)),
      meaning: names.map((one) => known.get(one).meaning).join("; "),
    });
  }
  return found;
}

/** Parts of a device right behind it. */
function inOrder(devices) {
  const names = new Set(devices.map((device) => device.device));
  const wholes = devices.filter((device) => device.parent === null || !names.has(device.parent));
  return wholes.flatMap((whole) => [
    whole,
    ...devices.filter((device) => device !== whole && device.parent === whole.device),
  ]);
}

function badges(device, run) {
  const found = [];
  if (device.error !== null) found.push({ kind: "bad", text: device.error });
  for (const reason of device.throttle) found.push({ kind: "warn", text: `slowed down: ${reason}` });
  if (device.parent !== null) found.push({ kind: "", text: `part of ${device.parent}` });
  const replicas = run === null ? [] : run.info.devices.flatMap((name, i) => {
    const uuid = run.info.uuids[i];
    const same = uuid === null || device.uuid === null ? name === device.device : uuid === device.uuid;
    return same ? [i] : [];
  });
  if (replicas.length) {
    found.push({ kind: "", text: `replica${replicas.length > 1 ? "s" : ""} ${replicas.join(", ")}` });
  }
  return found;
}

/** Show the processors and the memory of the host, and the threads of the run. */
export function showHost(section, sample, points) {
  const { host } = sample;
  // Where the processors are a device, its card shows all that.
  const isDevice = sample.devices.some((device) => device.source === "cpu");
  const own = section.querySelector(".own");
  own.hidden = isDevice;
  section.hidden = host === null || (isDevice && Object.keys(host.threads).length === 0);
  if (host === null) return;
  const metrics = ["utilization", "memory_used"];
  sync(
    own,
    [host],
    () => "host",
    () => card("host", metrics),
    (element) => {
      const { charts, title } = element.parts;
      write(title, `${host.num_cpus} processors`);
      write(element.parts.begin, `${seconds(view.end - view.begin)} ago`);
      const series = (i) => points.map((point) => [point.elapsed, point.host?.[i] ?? null]);
      charts.get("utilization").set(series(0), 1);
      charts.get("memory_used").set(series(1), host.memory_total, `of ${show(host.memory_total, "bytes")}`);
    },
  );
  showThreads(section.querySelector("#threads"), host.threads);
}

function showThreads(parent, threads) {
  const busiest = Object.entries(threads).sort((a, b) => b[1] - a[1]).slice(0, 16);
  parent.hidden = busiest.length === 0;
  if (parent.firstChild === null) {
    parent.append(make("h3", {}, "Threads of the run"), make("ul"));
  }
  sync(
    parent.lastChild,
    busiest,
    ([name]) => name,
    ([name]) => make("li", {}, make("span", {}, name), make("meter", { min: 0, max: 1 }), make("b")),
    (item, [name, use]) => {
      item.children[1].value = use;
      item.children[1].setAttribute("aria-label", `${name}: ${show(use, "ratio")} of a processor`);
      write(item.children[2], show(use, "ratio"));
    },
  );
}
