// The run that is watched: its replicas, and what they spend their time with.

import { shareBar, stepBar, TimeChart } from "./charts.js";
import { make, seconds, show, sync, write } from "./text.js";

let charts = null;
let drawn = "";

/** Show the run of the latest sample, with the points of the time shown. */
export function showRun(section, about, sample, points) {
  const { run } = sample;
  section.hidden = run === null;
  if (run === null) return;
  const colors = new Map(about.phases.map((phase) => [phase.name, phase]));
  const ours = points.filter((point) => point.run?.started === run.started);
  section.classList.toggle("past", sample.gone !== null);
  write(section.querySelector(".facts"), describe(run, sample.gone));
  showCharts(section.querySelector(".run-charts"), ours);
  showShares(section, about, sample, ours, colors);
  showLast(section, run, colors);
  sync(
    section.querySelector("#phases"),
    about.phases,
    (phase) => phase.name,
    (phase) => {
      const swatch = make("i");
      swatch.style.background = phase.color;
      return make("li", {}, swatch, phase.name);
    },
    () => {},
  );
}

function describe(run, gone) {
  const { info } = run;
  const facts = [`${info.wrapper}(${info.model})`, `process ${run.pid}`];
  if (info.world_size > 1) facts.push(`rank ${run.rank} of ${info.world_size}`);
  facts.push(`step ${run.num_steps.toLocaleString("en")}`);
  facts.push(`since ${seconds(run.time - run.started)}`);
  if (gone !== null) facts.push("gone");
  return facts.join("  ·  ");
}

/** Samples per second between the points at which steps were done, and how long steps took. */
function showCharts(parent, points) {
  if (charts === null) {
    charts = [
      new TimeChart("Throughput", "1/s", "the run", "var(--accent)"),
      new TimeChart("Time of a step", "s", "the run", "var(--power)"),
    ];
    parent.append(...charts.map((chart) => chart.element));
  }
  const speed = [];
  let before = null;
  for (const point of points) {
    if (before === null) before = point;
    const done = point.run.samples - before.run.samples;
    const time = point.elapsed - before.elapsed;
    if (done <= 0 || time <= 0) continue;
    speed.push([point.elapsed, done / time]);
    before = point;
  }
  charts[0].set(speed, null, "samples");
  charts[1].set(points.map((point) => [point.elapsed, point.run.seconds]));
}

function row(name) {
  const head = make("p", {}, make("b", {}, name), make("span"));
  return make("div", { class: "replica", role: "listitem" }, head, make("div", { class: "bar" }));
}

/** Per replica the share of each phase in the time shown, and its phase now. */
function showShares(section, about, sample, points, colors) {
  const { run } = sample;
  const [first, last] = [points[0], points.at(-1)];
  const steps = last === undefined ? 0 : last.run.steps - first.run.steps;
  // Before two samples are there: all steps so far.
  const base = steps > 0 ? first.run.totals : null;
  const text = steps > 0 ? `${steps.toLocaleString("en")} steps of the time shown` : "all steps";
  write(section.querySelector("#shares-title small"), text);
  sync(
    section.querySelector("#shares"),
    run.info.devices.map((device, index) => ({ device, index })),
    (replica) => replica.index,
    (replica) => row(`replica ${replica.index}`),
    (element, { device, index }) => {
      const [phase, since] = run.now[index] ?? ["idle", 0];
      const score = sample.scores[index];
      const facts = [device];
      if (sample.gone === null) facts.push(`now ${phase}${since >= 1 ? ` for ${seconds(since)}` : ""}`);
      if (score != null) facts.push(`speed ${show(score, "ratio")} of the fastest`);
      write(element.querySelector("span"), facts.join("  ·  "));
      const shares = about.phases.map(({ name }, i) => {
        const total = run.totals[index]?.[name] ?? 0;
        return [name, Math.max(0, total - (base?.[index]?.[i] ?? 0))];
      });
      shareBar(element.querySelector(".bar"), shares, colors);
    },
  );
}

/** Per replica what it did in the last step. */
function showLast(section, run, colors) {
  const { last } = run;
  const key = last === null ? "" : `${run.pid} ${last.number} ${last.time}`;
  if (key === drawn) return;
  drawn = key;
  const title = section.querySelector("#last-title small");
  const rows = section.querySelector("#last");
  if (last === null) {
    write(title, "none yet");
    rows.replaceChildren();
    rows.known?.clear();
    return;
  }
  write(title, `${last.number}, ${last.kind}, ${show(last.samples, "count")} samples, ${seconds(last.seconds)}`);
  // On an accelerator a replica may end later than the host.
  const ends = last.replicas.map((replica) => replica.segments.at(-1)?.end ?? 0);
  const length = Math.max(last.seconds, ...ends, 1e-9);
  write(section.querySelector(".axis").lastElementChild, seconds(length));
  sync(
    rows,
    last.replicas,
    (replica) => replica.index,
    (replica) => row(`replica ${replica.index}`),
    (element, replica) => {
      write(element.querySelector("span"), `${replica.device}  ·  ${replica.samples} samples`);
      stepBar(element.querySelector(".bar"), replica.segments, length, colors);
    },
  );
}
