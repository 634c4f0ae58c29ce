// The table of processes on the devices.

import { make, NONE, show, sync, write } from "./text.js";

const COLUMNS = [
  ["Device", (one) => one.device],
  ["PID", (one) => String(one.pid), "number"],
  ["Process", (one) => one.name ?? NONE, "long"],
  ["User", (one) => one.user ?? NONE],
  ["Device memory", (one) => show(one.memory, "bytes"), "number"],
  ["Device use", (one) => show(one.utilization, "ratio"), "number"],
  ["CPU", (one) => show(one.cpu, "ratio"), "number"],
  ["Host memory", (one) => show(one.host_memory, "bytes"), "number"],
];

/** Show one row per process and device. */
export function showProcesses(section, processes) {
  section.hidden = processes.length === 0;
  const count = new Set(processes.map((one) => one.pid)).size;
  write(section.querySelector(".facts"), `${count} on the devices`);
  const region = section.querySelector(".table");
  if (region.firstChild === null) {
    const heads = COLUMNS.map(([name, , kind]) => make("th", { scope: "col", class: kind ?? "" }, name));
    region.append(make("table", {}, make("thead", {}, make("tr", {}, ...heads)), make("tbody")));
  }
  sync(
    region.querySelector("tbody"),
    processes,
    (one) => `${one.device} ${one.pid}`,
    () => make("tr", {}, ...COLUMNS.map(([, , kind]) => make("td", { class: kind ?? "" }))),
    (row, one) =>
      COLUMNS.forEach(([, text], i) => {
        write(row.children[i], text(one));
        row.children[i].title = text(one);
      }),
  );
}
