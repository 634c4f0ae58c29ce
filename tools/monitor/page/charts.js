// Charts as SVG: lines over time that share one cursor, and bars of phases.

import { draw, make, NONE, seconds, show, write } from "./text.js";

const WIDTH = 600;
const HEIGHT = 60;
const BUCKETS = 300;

/** What all charts share: the time shown, and where the pointer is. */
export const view = { begin: 0, end: 1, gap: 5, cursor: null };

const charts = new Set();

/** Draw all charts that are on the page again. */
export function redraw() {
  for (const chart of charts) {
    if (chart.element.isConnected) chart.draw();
    else charts.delete(chart);
  }
}

/** A line over time. */
export class TimeChart {
  constructor(name, unit, subject, color = "var(--accent)") {
    Object.assign(this, { name, unit, subject, series: [], max: null, extra: "" });
    this.area = draw("path", { class: "area" });
    this.line = draw("path", { class: "line" });
    this.cursor = draw("line", { class: "cursor", y1: 0, y2: HEIGHT });
    const grid = draw("path", { class: "grid", d: `M0 .5H${WIDTH}M0 30H${WIDTH}M0 59.5H${WIDTH}` });
    this.svg = draw(
      "svg",
      { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img" },
      grid,
      this.area,
      this.line,
      this.cursor,
    );
    this.svg.style.color = color;
    this.value = make("b");
    this.limit = make("small");
    this.top = make("span", { class: "top", "aria-hidden": "true" });
    const caption = make("figcaption", {}, make("span", {}, name), this.value, this.limit);
    this.element = make("figure", { class: "chart" }, caption, this.svg, this.top);
    this.svg.addEventListener("pointermove", (event) => this.point(event));
    this.svg.addEventListener("pointerleave", () => {
      view.cursor = null;
      redraw();
    });
  }

  /** Show other values: pairs of time and value, the value at the top, text beside the value. */
  set(series, max = null, extra = "") {
    Object.assign(this, { series, max, extra });
    charts.add(this);
    this.element.hidden = !series.some(([, value]) => value !== null);
  }

  point(event) {
    const box = this.svg.getBoundingClientRect();
    const share = (event.clientX - box.left) / box.width;
    view.cursor = view.begin + share * (view.end - view.begin);
    redraw();
  }

  draw() {
    if (this.element.hidden) return;
    const shown = this.series.filter(([time]) => time >= view.begin && time <= view.end);
    const values = shown.map(([, value]) => value).filter((value) => value !== null);
    const top = this.max ?? (Math.max(0, ...values) * 1.15 || 1);
    const { line, area } = paths(thin(shown), top);
    this.line.setAttribute("d", line);
    this.area.setAttribute("d", area);
    write(this.top, this.max === null && values.length ? show(top, this.unit) : "");
    this.tell(values);
  }

  /** The number beside the chart: under the pointer, or the latest. */
  tell(values) {
    const at = view.cursor === null ? null : nearest(this.series, view.cursor);
    const now = this.series.at(-1)?.[1] ?? null;
    this.cursor.style.display = at === null ? "none" : "";
    if (at !== null) {
      const x = String(place(at[0]));
      this.cursor.setAttribute("x1", x);
      this.cursor.setAttribute("x2", x);
    }
    write(this.value, show(at === null ? now : at[1], this.unit));
    write(this.limit, at === null ? this.extra : `${seconds(view.end - at[0])} ago`);
    const range = values.length
      ? `${show(Math.min(...values), this.unit)} to ${show(Math.max(...values), this.unit)}`
      : NONE;
    const span = seconds(view.end - view.begin);
    this.svg.setAttribute(
      "aria-label",
      `${this.name} of ${this.subject}: now ${show(now, this.unit)}, ${range} in the last ${span}`,
    );
  }
}

function place(time) {
  return (WIDTH * (time - view.begin)) / (view.end - view.begin);
}

function nearest(series, time) {
  let best = null;
  for (const point of series) {
    if (best === null || Math.abs(point[0] - time) < Math.abs(best[0] - time)) best = point;
  }
  return best !== null && Math.abs(best[0] - time) <= view.gap ? best : null;
}

/** Fewer points: of each stretch the least and the greatest, so that no peak is lost. */
function thin(series) {
  if (series.length <= 2 * BUCKETS) return series;
  const kept = [];
  const size = series.length / BUCKETS;
  for (let i = 0; i < BUCKETS; i += 1) {
    const part = series.slice(Math.floor(i * size), Math.floor((i + 1) * size));
    const known = part.filter(([, value]) => value !== null);
    if (known.length === 0) {
      kept.push(part[0]);
      continue;
    }
    const least = known.reduce((a, b) => (b[1] < a[1] ? b : a));
    const most = known.reduce((a, b) => (b[1] > a[1] ? b : a));
    kept.push(...(least[0] <= most[0] ? [least, most] : [most, least]));
  }
  return kept;
}

/** The line, and the area under it, both broken where nothing is known. */
function paths(series, top) {
  const parts = [];
  let part = [];
  let before = null;
  const spacing = Math.max(view.gap, (3 * (view.end - view.begin)) / BUCKETS);
  for (const [time, value] of series) {
    if (value === null || (before !== null && time - before > spacing)) {
      if (part.length) parts.push(part);
      part = [];
    }
    before = time;
    if (value === null) continue;
    const y = HEIGHT - 1 - (HEIGHT - 2) * Math.min(1, Math.max(0, value / top));
    part.push([place(time).toFixed(1), y.toFixed(1)]);
  }
  if (part.length) parts.push(part);
  const lines = parts.map((points) => {
    // A single point would be invisible.
    const all = points.length > 1 ? points : [points[0], [Number(points[0][0]) + 1, points[0][1]]];
    return `M${all.map((point) => point.join(" ")).join("L")}`;
  });
  const areas = lines.map(
    (line, i) => `${line}V${HEIGHT}H${parts[i][0][0]}Z`,
  );
  return { line: lines.join(""), area: areas.join("") };
}

/** A bar of shares: pairs of phase and number. */
export function shareBar(bar, shares, colors) {
  const total = shares.reduce((sum, [, value]) => sum + value, 0);
  const known = shares.filter(([, value]) => value > 0);
  const text = ([phase, value]) => `${phase} ${show(value / total, "ratio")}`;
  bar.setAttribute("role", "img");
  bar.setAttribute("aria-label", known.map(text).join(", ") || "no steps in this time");
  const parts = known.map(([phase, value]) => {
    const part = make("i", { title: text([phase, value]) });
    part.style.flexGrow = String(value / total);
    part.style.background = colors.get(phase).color;
    part.style.color = colors.get(phase).ink;
    if (value / total > 0.09) part.append(show(value / total, "ratio"));
    return part;
  });
  bar.replaceChildren(...parts);
}

/** What one replica did in a step, from its beginning to its end. */
export function stepBar(bar, segments, length, colors) {
  const shown = segments.filter((one) => one.end - one.begin >= length / 4000);
  const parts = shown.map((one) => {
    const time = `${one.phase}: ${seconds(one.end - one.begin)}, from ${seconds(one.begin)}`;
    const part = draw("rect", { x: one.begin, width: one.end - one.begin, y: 0, height: 1 });
    part.style.fill = colors.get(one.phase).color;
    part.append(draw("title", {}, time));
    return part;
  });
  const label = shown.map((one) => `${one.phase} ${seconds(one.end - one.begin)}`).join(", ");
  const svg = draw(
    "svg",
    {
      viewBox: `0 0 ${length} 1`,
      preserveAspectRatio: "none",
      role: "img",
      "aria-label": label.slice(0, 400),
    },
    ...parts,
  );
  bar.replaceChildren(svg);
}
