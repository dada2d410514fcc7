// The fleet: what runs where, who waits and why, how much of every SLO is left.

import { bar, card, count, fill, h, jobColor, panel, percent, pill, seconds, shortJob, table } from "./dom.js";
import { Timeline } from "./timeline.js";

export const OVER = ["finished", "failed", "stopped", "refused"];

export class FleetView {
  constructor(place, context) {
    this.context = context;
    this.cards = h("div", { class: "cards" });
    this.filter = h("input", { type: "search", placeholder: "Find a job", "aria-label": "Find a job", oninput: () => this.update(this.snapshot) });
    this.jobs = h("div", {});
    this.side = h("div", { class: "side" });
    this.below = h("div", { class: "stack" });
    const lanes = h("div", {});
    this.jobsTitle = h("span", { class: "note" });
    fill(place, this.cards,
      h("section", { class: "panel wide" }, h("header", {}, h("h2", {}, "Timeline")), lanes),
      h("div", { class: "columns" },
        h("div", { class: "stack" }, h("section", { class: "panel" }, h("header", {}, h("h2", {}, "Jobs"), this.jobsTitle, h("span", { class: "grow" }), this.filter), this.jobs), this.below), this.side));
    this.timeline = new Timeline(lanes, { live: context.session.mode === "live", open: (job) => context.go("job", job), named: () => this.paintJobs() });
  }

  close() { this.timeline.close(); }

  update(snapshot) {
    this.snapshot = snapshot;
    this.timeline.setNow(snapshot.now_s, snapshot.lanes);
    fill(this.cards, cards(snapshot, this.before, this.context.session.mode));
    this.before ??= snapshot;
    if (snapshot.now_s - this.before.now_s > 5) this.before = snapshot;
    const wanted = this.filter.value.toLowerCase();
    const shown = snapshot.jobs.filter((row) => row.job.toLowerCase().includes(wanted)).sort((a, b) => OVER.includes(a.stage) - OVER.includes(b.stage));
    this.jobsTitle.textContent = `${snapshot.jobs.length}`;
    fill(this.jobs, this.jobTable(shown));
    this.paintJobs();
    const below = panelsBelow(snapshot), side = sidePanels(snapshot);
    fill(this.below, side.length ? below : []); // a recording has nothing else to show beside its jobs
    fill(this.side, side.length ? side : below);
  }

  // Jobs have the colours of their spans; which those are comes with the timeline.
  paintJobs() {
    const numbers = new Map((this.timeline.data?.jobs ?? []).map((job, at) => [job, at]));
    for (const row of this.jobs.querySelectorAll("tr[data-job]")) {
      const number = numbers.get(row.dataset.job);
      if (number !== undefined) row.querySelector(".job i").style.background = jobColor(number, "train");
    }
  }

  jobTable(rows) {
    const live = this.context.session.mode === "live";
    const columns = live ? ["job", "stage", "iteration", ">reward", "slowdown / bound", ">device time", "now"] : ["job", ">iterations", ">reward", "time", ">device time", ">began"];
    const cells = (row) => live
      ? [name(row), pill(row.stage), iterations(row), row.reward?.toFixed(3), budget(row), seconds(row.device_s), now(row)]
      : [name(row), row.iterations_done || row.iteration, row.reward?.toFixed(3), split(row.breakdown), seconds(row.device_s), seconds(row.began_s)];
    return table(columns, rows.slice(0, 200).map((row) => ({
      cells: cells(row),
      props: { class: "link", tabindex: "0", "data-job": row.job, onclick: () => this.context.go("job", row.job), onkeydown: (event) => { if (event.key === "Enter") this.context.go("job", row.job); } },
    })), "No job yet: submit one with slackwater job submit, or train with any client.");
  }
}

const name = (row) => h("span", { class: "job" }, h("i", {}), row.name ?? shortJob(row.job));

function iterations(row) {
  const done = row.iteration ?? row.iterations_done ?? 0;
  return row.iterations ? h("span", { class: "progress" }, bar(done / row.iterations, "train"), `${done}/${row.iterations}`) : String(done);
}

// How much of the tolerated slowdown is used up.
export function budget(row) {
  if (!row.bound) return h("span", { class: "faint" }, "no SLO");
  if (row.slowdown === null || row.slowdown === undefined) return h("span", { class: "faint" }, `– / ${row.bound.toFixed(2)}`);
  const used = (row.slowdown - 1) / Math.max(row.bound - 1, 1e-9);
  return h("span", { class: "progress" }, bar(used, used > 1 ? "bad" : used > 0.8 ? "warn" : "good"), `${row.slowdown.toFixed(2)} / ${row.bound.toFixed(2)}`);
}

function now(row) {
  if (row.why) return h("span", { class: "why" }, row.why);
  if (row.phase) return h("span", { class: `phase ${row.phase}` }, `${row.phase} for ${seconds(row.holds_s)}`);
  return OVER.includes(row.stage) || row.stage === "profiling" ? h("span", { class: "faint" }, row.reason) : "";
}

export function split(parts) {
  const total = Object.values(parts ?? {}).reduce((sum, value) => sum + value, 0);
  if (!total) return h("span", { class: "faint" }, "–");
  return h("span", { class: "split" }, Object.entries(parts).map(([part, value]) => h("i", { class: part, width: `${100 * value / total}%`, title: `${part}: ${seconds(value)} (${percent(value / total)})` })));
}

function cards(snapshot, before, mode) {
  const { jobs, gauges } = snapshot;
  if (mode !== "live") {
    return [card("recording", snapshot.title, seconds(snapshot.now_s)), card("jobs", String(jobs.length)), card("lanes", String(snapshot.lanes)),
      card("busy", percent(gauges.busy), "of all lanes' time")];
  }
  const waits = jobs.filter((row) => row.waits_s !== undefined && row.waits_s !== null || row.stage === "held").length;
  const running = jobs.filter((row) => !OVER.includes(row.stage)).length;
  const atRisk = jobs.filter((row) => row.bound && row.slowdown > row.bound && !OVER.includes(row.stage)).length;
  const made = [card("jobs", String(running), `${waits} wait`)];
  const pools = Object.entries(snapshot.pools ?? {});
  for (const [pool, use] of pools) made.push(card(`${pool} nodes`, percent(use.utilisation), `${use.busy} of ${use.nodes} busy now`));
  if (!pools.length) made.push(card("engines", String(gauges.engines ?? 0), `${gauges.trainers ?? 0} trainers`));
  made.push(card("turns", count((gauges.rollout_live_turns ?? 0) - (gauges.rollout_waiting_turns ?? 0)), `${count(gauges.rollout_waiting_turns ?? 0)} wait`));
  const tokens = (of) => of.jobs.reduce((sum, row) => sum + (row.tokens ?? 0), 0);
  const passed = before ? snapshot.now_s - before.now_s : 0;
  made.push(card("tokens / s", passed > 0.5 ? count(Math.round(Math.max(tokens(snapshot) - tokens(before), 0) / passed)) : "–"));
  made.push(card("training ops", count(gauges.waiting_operations ?? 0), "wait"));
  made.push(card("past their SLO", String(atRisk), "jobs", atRisk ? "bad" : "good"));
  return made;
}

function panelsBelow(snapshot) {
  const found = [], waiting = snapshot.jobs.filter((row) => row.why && !OVER.includes(row.stage));
  if (waiting.length) found.push(panel("Why others wait", "", h("ul", { class: "waits" }, waiting.slice(0, 20).map((row) => h("li", {}, h("b", {}, row.name ?? shortJob(row.job)), " ", row.why)))));
  if (snapshot.slack?.length) found.push(savings(snapshot));
  return found;
}

function sidePanels(snapshot) {
  const found = [];
  if (snapshot.nodes.length) {
    const rows = snapshot.nodes.slice(0, 60).map((row) => [row.node, row.job ? h("span", {}, shortJob(row.job), " ", h("span", { class: `phase ${row.phase}` }, row.phase)) : h("span", { class: "faint" }, row.tail ? `tail of ${shortJob(row.tail)}` : "idle"), seconds(row.since_s), h("span", { class: "progress" }, bar(row.utilisation, "train"), percent(row.utilisation))]);
    found.push(panel("Who holds what", `${snapshot.permits ? `${count(snapshot.permits.switches)} switches` : ""}`, table(["node", "held by", ">for", "used"], rows, "")));
  }
  if (snapshot.capacity) found.push(capacity(snapshot));
  if (snapshot.serving) found.push(serving(snapshot.serving));
  if (snapshot.weights.length) {
    const rows = snapshot.weights.slice(0, 20).map((row) => [h("span", { title: row.version }, row.job ? shortJob(row.job) : row.model), `#${row.number}`, row.offered, row.pulling || "", row.turns || ""]);
    found.push(panel("Weight versions", "newest of each model", table(["job", "version", ">held by", ">pulling", ">turns"], rows, "")));
  }
  if (snapshot.links?.length || snapshot.gauges.weights_payloads_brought) found.push(links(snapshot));
  if (snapshot.actions && (snapshot.actions.live.length || snapshot.gauges.sandboxes)) {
    const rows = snapshot.actions.live.map((row) => [shortJob(row.job), row.command, pill(row.state), seconds(row.age_s)]);
    found.push(panel("Actions", `${snapshot.gauges.actions_running} run, ${snapshot.gauges.actions_waiting} wait`, table(["job", "command", "state", ">age"], rows, "No action runs.")));
  }
  return found;
}

const SLACK = { phases: "phases of others", serving: "serving between bursts", spot: "spot", actions: "idle sandboxes", weights: "unchanged weights" };
const dollars = (value) => `${value < 0 ? "−" : ""}$${Math.abs(value) < 1000 ? Math.abs(value).toFixed(2) : count(Math.round(Math.abs(value)))}`;

// What the same work needs without sharing, what it took, and the difference.
function savings(snapshot) {
  const priced = snapshot.slack.some((row) => row.saved_dollars !== null && row.saved_dollars !== undefined);
  const amount = (value) => Math.abs(value) < 0.1 && value ? value.toFixed(3) : count(value);
  const saved = (row) => h("span", { class: row.saved > 0 ? "good" : row.saved < 0 ? "bad" : "" }, `${amount(row.saved)}${row.alone && row.saved ? ` (${percent(row.saved / row.alone)})` : ""}`);
  const named = (row) => h("span", { title: row.detail }, SLACK[row.kind] ?? row.kind, " ", h("span", { class: "faint" }, row.unit));
  const rows = snapshot.slack.map((row) => [named(row), amount(row.alone), amount(row.used), saved(row), ...(priced ? [row.saved_dollars === null ? "" : dollars(row.saved_dollars)] : [])]);
  const paid = (snapshot.cost ?? []).map((row) => `${row.kind} ${amount(row.present_h)} h, ${percent(row.busy)} busy${row.dollars === null ? "" : `, ${dollars(row.dollars)}`}`);
  return panel("Cost and savings", "by kind of slack", table(["slack", ">without", ">with", ">saved", ...(priced ? [">dollars"] : [])], rows, ""),
    paid.length ? h("p", { class: "note" }, `Devices here so far: ${paid.join("; ")}.`) : null);
}

// Weights between nodes: what moves now, and how often a slow link was used so far.
function links(snapshot) {
  const { gauges } = snapshot;
  const rows = snapshot.links.map((row) => [h("span", { title: row.version }, row.delta ? "delta" : "whole"), `${row.source} → ${row.node}`, row.slow ? h("span", { class: "why" }, "slow") : "", `${count(row.bytes)}B`]);
  const note = `${count(gauges.weights_payloads_brought ?? 0)} so far, ${count(gauges.weights_payloads_over_slow_links ?? 0)} over slow links`;
  return panel("Links", note, table(["weights", "between", "link", ">size"], rows, "Nothing moves between nodes."));
}

function capacity(snapshot) {
  const rows = Object.entries(snapshot.capacity).map(([kind, states]) => [h("span", { class: `kind ${kind}` }, kind), Object.entries(states).map(([state, many]) => h("span", { class: `pill ${state}` }, `${many} ${state}`))]);
  const lent = Object.entries(snapshot.serving?.lent ?? {}).map(([worker, job]) => h("li", {}, `${worker} is lent to ${shortJob(job)}`));
  for (const [worker, why] of Object.entries(snapshot.serving?.not_lent ?? {})) lent.push(h("li", {}, `${worker} is not lent: ${why}`));
  return panel("Capacity", "dedicated, spot and borrowed engines", table(["kind", "engines"], rows, "No engine has joined."),
    snapshot.starting?.length ? h("p", { class: "note" }, `starting: ${snapshot.starting.slice(0, 6).join(", ")}`) : null, lent.length ? h("ul", { class: "waits" }, lent) : null);
}

function serving(served) {
  const minutes = served.minutes.slice(-60), requests = minutes.reduce((sum, one) => sum + one.requests, 0);
  const met = requests ? minutes.reduce((sum, one) => sum + one.attainment * one.requests, 0) / requests : 1;
  const left = Math.max(1 - (1 - met) / Math.max(1 - served.slo.share, 1e-9), 0), exact = (share) => `${(100 * share).toFixed(1)} %`;
  return panel("Serving SLO", served.model, h("div", { class: "cards small" }, card("met", exact(met), `of ${count(requests)} requests; wanted: ${exact(served.slo.share)}`), card("error budget", percent(left), "left of the last hour", left < 0.2 ? "bad" : "good")));
}
