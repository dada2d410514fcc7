// The planner on the current jobs: the plan as things are beside the plan as they would be.

import { ask, fill, h, panel, percent, shortJob, table } from "./dom.js";

const PRESETS = [
  ["One more rollout node", { rollout_nodes: 1 }], ["One more train node", { train_nodes: 1 }],
  ["One node fewer", { rollout_nodes: -1 }], ["No spot", { without_spot: true }], ["SLO 1.5", { slo: 1.5 }], ["SLO 3", { slo: 3 }],
];

export class WhatIfView {
  constructor(place, context) {
    this.result = h("div", { class: "stack" }, h("p", { class: "empty" }, "Choose a change. The planner places the current jobs twice, as things are and as they would be, and runs both plans in virtual time."));
    const number = (name, label) => h("label", {}, label, h("input", { type: "number", name, step: "1", value: "0" }));
    const form = h("form", { class: "inline", onsubmit: (event) => { event.preventDefault(); this.ask(this.read(form)); } },
      number("rollout_nodes", "rollout nodes ±"), number("train_nodes", "train nodes ±"),
      h("label", {}, "SLO of every job", h("input", { type: "number", name: "slo", step: "0.1", min: "1", placeholder: "as it is" })),
      h("label", { class: "check" }, h("input", { type: "checkbox", name: "without_spot" }), "no spot"), h("button", {}, "Plan"));
    fill(place, panel("What if", "the planner on the current jobs", h("div", { class: "presets" }, PRESETS.map(([text, change]) => h("button", { class: "quiet", onclick: () => this.ask(change, text) }, text))), form), this.result);
  }

  update() { /* a plan is of the moment at which it was asked for */ }

  read(form) {
    const slo = Number(form.elements.slo.value);
    return { rollout_nodes: Number(form.elements.rollout_nodes.value) || 0, train_nodes: Number(form.elements.train_nodes.value) || 0, without_spot: form.elements.without_spot.checked, slo: slo || null };
  }

  async ask(change, title = "Your change") {
    fill(this.result, h("p", { class: "empty working" }, `Planning: ${title} …`));
    try {
      const { now, then } = await ask("what-if", { body: change });
      fill(this.result, h("div", { class: "columns even" }, panel(title, `${now.jobs} jobs`, this.compared(now, then)), panel("Job by job", null, this.jobs(now, then))));
    } catch (error) { fill(this.result, h("p", { class: "error", role: "alert" }, error.message)); }
  }

  compared(now, then) {
    const line = (name, of, show, better) => {
      const change = of(then) - of(now), kind = Math.abs(change) < 1e-9 || !better ? "faint" : Math.sign(change) === better ? "good" : "bad";
      return [name, show(of(now)), h("b", {}, show(of(then))), h("span", { class: kind }, Math.abs(change) < 1e-9 ? "same" : `${change > 0 ? "+" : "−"}${show(Math.abs(change))}`)];
    };
    const whole = (value) => String(Math.round(value)), ratio = (value) => `${value.toFixed(2)}x`;
    return table(["", ">now", ">then", ">change"], [
      line("rollout nodes", (plan) => plan.rollout_nodes, whole, 0), line("train nodes", (plan) => plan.train_nodes, whole, 0),
      line("jobs that have a place", (plan) => plan.placed, whole, 1), line("nodes in use", (plan) => plan.nodes_used, whole, -1),
      line("nodes that the same jobs need alone", (plan) => plan.nodes_alone, whole, 0),
      line("mean slowdown over running alone", (plan) => plan.mean_slowdown, ratio, -1), line("SLO kept", (plan) => plan.slo_kept, percent, 1),
    ], "");
  }

  jobs(now, then) {
    const names = [...new Set([...Object.keys(now.per_job), ...Object.keys(then.per_job), ...[...now.refusals, ...then.refusals].map((row) => row.job)])];
    const cell = (plan, job) => {
      const found = plan.per_job[job], away = plan.refusals.find((row) => row.job === job);
      if (found) return h("span", { class: found.slowdown > found.slo ? "bad" : "" }, `${found.slowdown.toFixed(2)}x of ${found.slo.toFixed(2)}`);
      return h("span", { class: "bad", title: away?.reason ?? "" }, away?.for_good ? "refused" : "waits");
    };
    return table(["job", ">slowdown now", ">slowdown then", "why it has no place"], names.map((job) => [shortJob(job), cell(now, job), cell(then, job), then.refusals.find((row) => row.job === job)?.reason ?? ""]), "");
  }
}
