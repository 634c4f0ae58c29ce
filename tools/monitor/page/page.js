// Asks the server for samples, keeps those of the last while, and shows them.

import { redraw, view } from "./charts.js";
import { showDevices, showHost } from "./devices.js";
import { showProcesses } from "./processes.js";
import { showRun } from "./run.js";
import { make, seconds, sync, write } from "./text.js";

const KEPT = 1800;
const TIMEOUT = 5000;
const byId = (id) => document.getElementById(id);

const state = { about: null, history: null, last: 0, points: [], sample: null, span: 300 };
let token = takeToken();
let timer = 0;
let heard = null;
let arrived = null;

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
  const headers = token === null ? {} : { Authorization: `Bearer ${encode(token)}` };
  const signal = AbortSignal.timeout(TIMEOUT);
  const answer = await fetch(path, { headers, signal, cache: "no-store" });
  if (answer.status === 401) throw new NeedsToken();
  if (!answer.ok) throw new Error(`${answer.status} ${answer.statusText}`);
  return answer.json();
}

/** Bytes of UTF-8, one per letter, since a header holds no others. */
function encode(text) {
  return String.fromCharCode(...new TextEncoder().encode(text));
}

async function poll() {
  clearTimeout(timer);
  let pause = 2000;
  try {
    state.about ??= await get("api/about");
    const news = await get(`api/samples?after=${state.last}`);
    heard = Date.now();
    byId("ask").hidden = true;
    if (take(news)) {
      pause = Math.min(5000, Math.max(250, 1000 * state.about.interval));
      tellProgress(news);
    } else {
      pause = 0;
    }
  } catch (error) {
    if (error instanceof NeedsToken) {
      askForToken();
      return;
    }
    tellGone(error);
  }
  timer = setTimeout(poll, pause);
}

/** Keep what is new; false if it comes from another history than the one that is kept. */
function take(news) {
  if (state.history !== news.history) {
    const isFirst = state.history === null;
    Object.assign(state, { history: news.history, points: [], last: 0, sample: null });
    if (!isFirst) {
      state.about = null;
      return false;
    }
  }
  if (news.last > state.last) arrived = Date.now();
  state.last = news.last;
  state.sample = news.sample;
  state.points.push(...news.points);
  state.points.splice(0, state.points.length - KEPT);
  if (news.points.length && !document.hidden) render();
  return true;
}

function render() {
  const { about, sample, points } = state;
  if (sample === null) return;
  view.end = points.at(-1).elapsed;
  const first = points[0].elapsed;
  view.begin = Math.max(view.end - state.span, Math.min(first, view.end - 20 * about.interval));
  view.gap = Math.max(3 * about.interval, 1);
  const shown = points.filter((point) => point.elapsed >= view.begin);
  byId("notes").hidden = sample.notes.length === 0;
  list(byId("notes").querySelector("ul"), sample.notes, () => "");
  list(
    byId("alerts"),
    sample.alerts.map((alert) => alert.text),
    (text) => sample.alerts.find((alert) => alert.text === text).severity,
  );
  showRun(byId("run"), about, sample, shown);
  showDevices(byId("devices"), about, sample, shown);
  showProcesses(byId("processes"), sample.processes);
  showHost(byId("host"), sample, shown);
  write(byId("cost"), `A sample each ${seconds(about.interval)}; the last one took ${seconds(sample.cost)}`);
  redraw();
}

function list(parent, texts, kind) {
  parent.hidden = texts.length === 0;
  sync(parent, texts, (text) => text, (text) => make("li", { class: kind(text) }, text), () => {});
}

// --- what the server is doing ------------------------------------------------------------------

function tell(kind, text) {
  byId("status").className = kind;
  write(byId("status").querySelector("span"), text);
  document.body.classList.toggle("stale", kind === "gone");
}

function alarm(text) {
  byId("alarm").hidden = text === "";
  write(byId("alarm"), text);
}

function tellProgress(news) {
  if (news.progress === "failed") {
    tell("gone", "stopped");
    alarm(`Taking samples has failed: ${news.error}. The server's terminal shows more.`);
    return;
  }
  if (news.progress === "finished") {
    tell("done", "end of the recording");
    alarm("");
    return;
  }
  const silence = (Date.now() - (arrived ?? Date.now())) / 1000;
  if (silence > Math.max(10, 5 * state.about.interval)) {
    tell("gone", "no samples");
    alarm(`The server answers, but has had no sample for ${seconds(Math.ceil(silence))}: a device or its driver may hang.`);
    return;
  }
  const time = state.sample === null ? "" : new Date(1000 * state.sample.time).toLocaleTimeString();
  tell("live", state.sample === null ? "waiting for the first sample" : `live, ${time}`);
  alarm("");
}

function tellGone(error) {
  tell("gone", "not connected");
  const since = heard === null ? "" : ` for ${seconds(Math.ceil((Date.now() - heard) / 1000))}`;
  const why = error instanceof TypeError || error.name === "TimeoutError" ? "" : ` (${error.message})`;
  alarm(`The server has not answered${since}${why}. Is "dataparallel monitor serve" running? Trying again.`);
}

function askForToken() {
  tell("gone", "token needed");
  alarm(token === null ? "" : "This is not the token of the server.");
  byId("ask").hidden = false;
  byId("token").focus();
}

byId("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  token = byId("token").value;
  sessionStorage.setItem("token", token);
  byId("token").value = "";
  poll();
});

byId("window").addEventListener("change", (event) => {
  state.span = Number(event.target.value);
  render();
});

document.addEventListener("visibilitychange", () => {
  if (document.hidden || !byId("ask").hidden) return;
  render();
  poll();
});

poll();
