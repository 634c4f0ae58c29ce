// Numbers as people read them, and elements. Text from outside only ever becomes text nodes.

export const NONE = "n/a";

/** A number in a unit with a prefix: 61.2 GiB, 1.4 kW. */
function scaled(value, base, units) {
  let i = 0;
  let rest = Math.abs(value);
  while (i + 1 < units.length && rest >= base * 0.9995) {
    rest /= base;
    i += 1;
  }
  const digits = i === 0 || rest >= 99.95 ? 0 : rest >= 9.995 ? 1 : 2;
  return `${(Math.sign(value) * rest).toFixed(digits)} ${units[i]}`;
}

const FORMATS = {
  ratio: (v) => `${(100 * v).toFixed(0)} %`,
  bytes: (v) => scaled(v, 1024, ["B", "KiB", "MiB", "GiB", "TiB"]),
  "bytes/s": (v) => scaled(v, 1000, ["B/s", "kB/s", "MB/s", "GB/s", "TB/s"]),
  W: (v) => (v < 1000 ? `${v.toFixed(0)} W` : `${(v / 1000).toFixed(2)} kW`),
  J: (v) => scaled(v, 1000, ["J", "kJ", "MJ", "GJ"]),
  C: (v) => `${v.toFixed(0)} °C`,
  Hz: (v) => scaled(v, 1000, ["Hz", "kHz", "MHz", "GHz"]),
  count: (v) => v.toLocaleString("en"),
  s: seconds,
  "1/s": (v) => `${v >= 100 ? v.toFixed(0) : v.toPrecision(3)} /s`,
};

/** A value with its unit; what is not available is told so. */
export function show(value, unit) {
  return value === null || value === undefined ? NONE : FORMATS[unit](value);
}

/** A duration. */
export function seconds(value) {
  if (value < 1e-3) return `${(value * 1e6).toFixed(0)} µs`;
  if (value < 0.0995) return `${(value * 1e3).toPrecision(3)} ms`;
  if (value < 1) return `${(value * 1e3).toFixed(0)} ms`;
  if (value < 120) return `${Number.isInteger(value) ? value : value.toPrecision(3)} s`;
  if (value < 7200) return `${(value / 60).toFixed(0)} min`;
  return `${(value / 3600).toFixed(1)} h`;
}

const CAPITALS = { sm: "SM", ecc: "ECC", pcie: "PCIe", nvlink: "NVLink", dram: "DRAM" };

/** The name of a metric as a label: sm_clock_max is "SM clock max". */
export function label(name) {
  if (name === "sm_clock") return "Clock";
  const words = name.split("_").map((word) => CAPITALS[word] ?? word);
  const text = words.join(" ");
  return text[0].toUpperCase() + text.slice(1);
}

/** A new element: tag, attributes, children; a string is a text. */
export function make(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

const SVG = "http://www.w3.org/2000/svg";

/** The same for a drawing. */
export function draw(tag, attributes = {}, ...children) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

/** Set a text if it is another one, so that a selection stays. */
export function write(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/** Give a parent one child per item, in order; a child stays with the key of its item. */
export function sync(parent, items, key, create, update) {
  const known = (parent.known ??= new Map());
  const wanted = new Map(items.map((item) => [String(key(item)), item]));
  for (const [name, child] of known) {
    if (!wanted.has(name)) {
      child.remove();
      known.delete(name);
    }
  }
  let place = parent.firstChild;
  for (const [name, item] of wanted) {
    let child = known.get(name);
    if (child === undefined) {
      child = create(item);
      known.set(name, child);
    }
    if (child === place) place = place.nextSibling;
    else parent.insertBefore(child, place);
    update(child, item);
  }
}
