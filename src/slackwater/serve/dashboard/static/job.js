// One job: its curves, where its time goes, its slowest trajectories, checkpoints and logs.

import { ask, card, count, css, fill, h, panel, percent, pill, seconds, shortJob, table, whenReleased } from "./dom.js";
import { OVER, budget, split } from "./fleet.js";
import { Timeline } from "./timeline.js";
import uPlot from "./uPlot.esm.js";


if (!document.querySelector("link[data-charts]")) document.head.append(h("link", { rel: "stylesheet", href: "/dashboard/static/uPlot.min.css", "data-charts": true }));

export class JobView {
  constructor(place, job, context) {
    Object.assign(this, { job, context, charts: new Map(), logPlace: -65536 });
    this.head = h("div", { class: "jobhead" });
    this.buttons = h("span", { class: "buttons" });
    this.said = h("p", { class: "error", role: "alert", hidden: true });
    this.cards = h("div", { class: "cards" });
    this.curves = h("div", { class: "curves" });
    this.parts = h("div", {});
    this.turns = h("div", {});
    this.checkpoints = h("div", {});
    this.conversation = h("div", { class: "stack" });
    this.log = h("pre", { class: "log", tabindex: "0", "aria-label": "Log" });
    const lanes = h("div", {});
    fill(place, this.head, this.said, this.cards, this.curves,
      panel("Where its time goes", null, this.parts), h("section", { class: "panel wide" }, h("header", {}, h("h2", {}, "On the timeline")), lanes),
      panel("Log", null, this.log),
      h("div", { class: "columns even" }, panel("Slowest trajectories", "under way, then ended lately", this.turns), panel("Checkpoints", null, this.checkpoints)),
      this.conversation);
    this.timeline = new Timeline(lanes, { live: context.session.mode === "live", only: job, open: (other) => context.go("job", other) });
    this.timer = setInterval(() => this.load(), context.session.mode === "live" ? 2000 : 3_600_000);
    this.load();
  }

  close() { this.closed = true; clearInterval(this.timer); this.sizes?.disconnect(); this.timeline.close(); for (const chart of this.charts.values()) chart.destroy(); }

  update(snapshot) {
    this.timeline.setNow(snapshot.now_s, snapshot.lanes);
    const row = snapshot.jobs.find((one) => one.job === this.job);
    if (row) { this.row = row; this.showHead(); }
  }

  async load() {
    try {
      this.facts = await ask(`job?job=${encodeURIComponent(this.job)}`);
    } catch (error) { this.say(error.message); return; }
    if (this.closed) return;
    whenReleased("job", () => { this.showHead(); this.showCurves(); this.showParts(); this.showTurns(); this.showCheckpoints(); });
    this.loadLog();
  }

  say(text) { this.said.textContent = text; this.said.hidden = !text; }

  showHead() {
    const row = { ...this.row, ...this.facts, ...this.row };
    const live = this.context.session.mode === "live", over = OVER.includes(row.stage);
    fill(this.head, h("a", { href: "#fleet", class: "back" }, "← Fleet"), h("h1", {}, row.name ?? shortJob(this.job)), row.stage ? pill(row.stage) : null,
      h("span", { class: "note" }, row.why || (over || row.stage === "profiling" ? row.reason : "")), h("span", { class: "grow" }), this.buttons);
    if (live && row.stage !== this.stage) {
      this.stage = row.stage;
      const act = (what, text, kind) => h("button", { class: kind, onclick: (event) => this.act(what, event.target) }, text);
      fill(this.buttons, over ? (row.stage === "finished" ? null : act("resume", "Resume", "good")) : act("stop", "Stop", "bad"));
    }
    const done = row.iteration ?? row.iterations_done ?? 0;
    fill(this.cards, card("iteration", row.iterations ? `${done} / ${row.iterations}` : String(done), row.recipe ?? ""),
      row.reward === undefined || row.reward === null ? null : card("reward", row.reward.toFixed(3)),
      live ? h("div", { class: "card" }, h("span", { class: "name" }, "slowdown / bound"), budget(row), h("span", { class: "detail" }, row.slo ? `SLO ${row.slo}` : "")) : null,
      card("device time", seconds(row.device_s), row.engine_s === undefined ? "" : `${seconds(row.engine_s)} engines, ${seconds(row.trainer_s)} trainers`),
      row.tokens === undefined ? null : card("tokens", count(row.tokens), `${count(row.turns)} turns`),
      row.switches === undefined ? null : card("switches", String(row.switches)),
      row.crashes ? card("crashes", String(row.crashes), "", "bad") : null, card("age", seconds(row.age_s)));
  }

  async act(what, button) {
    button.disabled = true;
    this.say("");
    try {
      await ask(`${what}?job=${encodeURIComponent(this.job)}`, { post: true });
    } catch (error) { this.say(error.message); }
    this.stage = null;
    await this.load();
  }

  showCurves() {
    const curves = this.facts.curves ?? {}, steps = curves.step;
    if (!steps?.length) { if (!this.charts.size) fill(this.curves, h("p", { class: "empty" }, "No curves: this job's driver is not the service's, or has not finished a step.")); return; }
    const wanted = [["reward", ["reward", "reward/best"]], ["loss", ["optim/loss"]], ["seconds per iteration", ["time/sample_s", "time/train_s"]], ["tokens per answer", ["answer/tokens"]]];
    const found = wanted.map(([title, names]) => [title, names.filter((name) => curves[name]?.some((value) => value !== null))]).filter(([, names]) => names.length);
    if (found.length !== this.charts.size) {
      for (const chart of this.charts.values()) chart.destroy();
      const figures = found.map(([title]) => h("figure", {}, h("figcaption", {}, title)));
      fill(this.curves, figures); // all of them before the first is measured
      this.charts = new Map(found.map(([title, names], at) => [title, this.chart(figures[at], names, [steps, ...names.map((name) => curves[name])])]));
      this.sizes?.disconnect();
      this.sizes = new ResizeObserver(() => found.forEach(([title], at) => this.charts.get(title)?.setSize({ width: figures[at].clientWidth - 12, height: 170 })));
      this.sizes.observe(this.curves);
    }
    for (const [title, names] of found) this.charts.get(title).setData([steps, ...names.map((name) => curves[name])]);
  }

  chart(place, names, data) {
    const axis = { stroke: css("--muted"), grid: { stroke: css("--line"), width: 1 }, ticks: { show: false }, font: "11px system-ui, sans-serif" };
    const colors = [css("--accent"), css("--train"), css("--rollout")];
    const value = (plot, under, series, at) => shown(at === null ? plot.data?.[series]?.findLast((one) => one !== null) : under);
    return new uPlot({
      width: Math.max(place.clientWidth - 12, 200), height: 170, legend: { live: true }, cursor: { y: false },
      scales: { x: { time: false } }, axes: [{ ...axis, size: 24, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 5000, 10000] }, { ...axis, size: 46 }],
      series: [{ label: "step", value }, ...names.map((name, at) => ({ label: name, value, stroke: colors[at], width: 1.6, points: { show: data[0].length < 12 }, fill: names.length === 1 ? css("--area") : undefined }))],
    }, data, place);
  }

  showParts() {
    const parts = this.facts.breakdown ?? {}, total = Object.values(parts).reduce((sum, value) => sum + value, 0);
    fill(this.parts, total ? [h("div", { class: "large" }, split(parts)), h("div", { class: "legend" }, Object.entries(parts).filter(([, value]) => value).map(([part, value]) => h("span", { class: `key ${part}` }, h("i", {}), `${part} ${seconds(value)} (${percent(value / total)})`)))] : h("p", { class: "empty" }, "Nothing was seen of it since the service started."));
  }

  showTurns() {
    const rows = (this.facts.trajectories ?? []).map((one) => ({
      cells: [h("span", { title: one.trajectory }, one.trajectory.slice(-12)), seconds(one.took_s), seconds(one.waited_s), one.turns ?? 1, count(one.prompt_tokens), one.limit ? `${one.tokens}/${one.limit}` : count(one.tokens), one.moves || "", one.state === "ended" ? h("span", { class: "faint" }, one.state) : one.state],
      props: { class: "link", tabindex: "0", "data-trajectory": one.trajectory, onclick: () => this.converse(one.trajectory), onkeydown: (event) => { if (event.key === "Enter") this.converse(one.trajectory); } },
    }));
    fill(this.turns, table(["trajectory", ">took", ">waited", ">turns", ">prompt", ">tokens", ">moves", "engine"], rows, this.context.session.mode === "live" ? "No trajectory yet." : "A recording keeps no trajectories."));
  }

  async converse(trajectory) {
    try {
      const found = await ask(`conversation?job=${encodeURIComponent(this.job)}&trajectory=${encodeURIComponent(trajectory)}`);
      fill(this.conversation, conversation(found));
      this.conversation.scrollIntoView({ block: "nearest" });
    } catch (error) { fill(this.conversation, h("p", { class: "error", role: "alert" }, error.message)); }
  }

  showCheckpoints() {
    const rows = (this.facts.checkpoints ?? []).map((one) => [h("code", {}, one.path), one.kind, one.bytes === undefined ? `step ${one.step}` : count(one.bytes)]);
    fill(this.checkpoints, table(["path", "kind", ">bytes"], rows, "No checkpoint yet."));
  }

  async loadLog() {
    if (this.facts.run === undefined && this.context.session.mode === "live") { this.log.textContent = "Its driver runs elsewhere, so its output is there too."; return; }
    try {
      const found = await ask(`logs?job=${encodeURIComponent(this.job)}&place=${this.logPlace}`);
      this.logPlace = found.place;
      if (!found.text && !this.log.textContent) this.log.textContent = "";
      if (found.text) {
        const atEnd = this.log.scrollTop + this.log.clientHeight >= this.log.scrollHeight - 8;
        this.log.append(found.text);
        while (this.log.childNodes.length > 200) this.log.firstChild.remove();
        if (atEnd) this.log.scrollTop = this.log.scrollHeight;
      }
    } catch (error) { if (!this.log.textContent) this.log.textContent = error.message; }
  }
}

const shown = (value) => value === null || value === undefined ? "" : Number.isInteger(value) ? String(value) : value.toPrecision(3);

const SHADES = [["likely", "more likely than 50 %"], ["unsure", "10 to 50 %"], ["unlikely", "less than 10 %"]];

// Every token; those that were sampled are shaded by their log-probability, so that what surprised
// the model stands out. The text of a client, an environment or a tool is not shaded.
function conversation(found) {
  const sampled = found.logprobs.filter((value) => value !== null);
  const mean = sampled.length ? sampled.reduce((sum, value) => sum + value, 0) / sampled.length : 0;
  const text = (at) => found.texts === null ? `${found.ids[at]} ` : found.texts[at];
  const spans = [];
  for (let at = 0; at < found.ids.length; at++) {
    const value = found.logprobs[at];
    if (value === null) { // one element for what was not sampled
      let given = "";
      for (; at < found.ids.length && found.logprobs[at] === null; at++) given += text(at);
      at--;
      spans.push(h("span", { class: "given" }, given));
      continue;
    }
    const likely = Math.exp(value), kind = likely > 0.5 ? "likely" : likely > 0.1 ? "unsure" : "unlikely";
    spans.push(h("span", { class: kind, title: `token ${found.ids[at]}, log-prob ${value.toFixed(3)}` }, text(at)));
  }
  const note = `${found.turns} turn${found.turns > 1 ? "s" : ""}, ${count(found.ids.length)} tokens, ${count(sampled.length)} sampled, mean log-prob ${mean.toFixed(3)}, weights ${found.version}`;
  return panel("Conversation", note, found.left_out ? h("p", { class: "note" }, `The first ${count(found.left_out)} tokens are left out.`) : null,
    found.texts === null ? h("p", { class: "note" }, "The model has no tokenizer.json: tokens are shown by number.") : null, h("pre", { class: "conversation", tabindex: "0", "aria-label": "Conversation" }, spans),
    h("p", { class: "legend" }, SHADES.map(([kind, text]) => h("span", { class: `key ${kind}` }, h("i", {}), text)), "point at a token for its log-prob"));
}
