// The fleet's timeline on a canvas: only what is visible is asked for and drawn.

import { ask, css, fill, h, jobColor, seconds, shortJob } from "./dom.js";

const KINDS = ["rollout", "train", "sync", "switch", "tail", "fault"];
const GUTTER = 132, AXIS = 24, MAP = 42, REFRESH_MS = 1500, LEAST_S = 0.05;
const SETTLED_S = 10, RELOAD_S = 60; // a span may be reported a little late

export class Timeline {
  constructor(place, { live, open, only, named }) {
    Object.assign(this, { live, open, only, named, start: 0, end: 60, width: 0, height: 0, now: 0, scroll: 0, follow: live, laneCount: 0, data: null, overview: null });
    this.canvas = h("canvas", { class: "lanes", tabindex: "0", "aria-label": "Timeline: wheel zooms, drag pans" });
    this.map = h("canvas", { class: "map", "aria-label": "Overview of the whole run" });
    this.tip = h("div", { class: "tip", hidden: true });
    this.range = h("span", { class: "note" });
    const button = (text, title, act) => h("button", { class: "quiet", title, onclick: act }, text);
    this.followButton = button("Follow", "Keep the present in view", () => { this.follow = true; this.setWindow(this.now - (this.end - this.start), this.now); });
    this.legend = h("span", { class: "legend" });
    this.colorButton = button("By phase", "Colour by job or by phase", () => { this.byPhase = !this.byPhase; this.showLegend(); this.draw(); });
    this.showLegend();
    fill(place, h("div", { class: "tools" },
      button("−", "Zoom out", () => this.zoom(2)), button("+", "Zoom in", () => this.zoom(0.5)),
      button("Fit", "Show the whole run", () => { this.follow = false; this.setWindow(0, Math.max(this.now, 1)); }),
      live ? this.followButton : null, this.range, h("span", { class: "grow" }), this.legend, this.colorButton), this.map, h("div", { class: "stage" }, this.canvas, this.tip));
    this.listen();
    this.observer = new ResizeObserver(() => this.resize());
    this.observer.observe(this.canvas);
    this.timer = setInterval(() => { if (this.live) this.load(); }, REFRESH_MS);
    this.mapTimer = setInterval(() => { if (this.live) this.loadMap(); }, 5000);
  }

  close() { this.observer.disconnect(); clearInterval(this.timer); clearInterval(this.mapTimer); this.closed = true; }

  showLegend() {
    const item = (kind, text) => h("span", { class: `key ${this.byPhase ? "" : "shade"} ${kind}` }, h("i", {}), text);
    const phases = this.byPhase ? ["rollout", "train", "sync"] : ["rollout: dark", "train: bright", "sync: thin"];
    fill(this.legend, this.byPhase ? null : "a colour per job", item("rollout", phases[0]), item("train", phases[1]), item("sync", phases[2]), item("bubble", "bubble"), item("switch", "switch"), item("fault", "fault"));
    this.colorButton.classList.toggle("on", Boolean(this.byPhase));
  }

  // The first figures set the window and how tall it is; later ones move it while the present is followed.
  setNow(now, lanes) {
    const first = this.now === 0;
    this.now = now;
    if (first) { this.laneCount = lanes; this.resize(); this.setWindow(this.live ? Math.max(now - 120, 0) : 0, Math.max(now, 1), 0); this.loadMap(); }
    else if (this.follow) { const width = Math.max(this.end - this.start, this.zoomed ? 0 : Math.min(now, 120)); this.start = now - width; this.end = now; this.draw(); }
  }

  setWindow(start, end, delay = 60) {
    const width = Math.max(end - start, LEAST_S);
    const most = Math.max(this.now, 1) * 1.1 + 1;
    this.start = Math.max(Math.min(start, this.now), -0.05 * most);
    this.end = this.start + Math.min(width, most);
    this.followButton.classList.toggle("on", this.follow);
    this.draw();
    this.loadSoon(delay);
  }

  loadSoon(delay = 60) { clearTimeout(this.soon); this.soon = setTimeout(() => this.load(), delay); }

  zoom(factor, at = (this.start + this.end) / 2) {
    this.zoomed = true;
    if (this.follow) at = this.end;
    this.setWindow(at - (at - this.start) * factor, at + (this.end - at) * factor);
  }

  get lanes() { return this.data?.lanes ?? []; }
  get row() { const n = this.laneCount; return n <= 14 ? 24 : n <= 40 ? 18 : n <= 120 ? 13 : 12; }
  get wanted() { return { width: Math.round(this.plot * 2), count: Math.min(Math.ceil(this.height / this.row) + 16, 400) }; }
  get plot() { return Math.max(this.width - GUTTER, 50); }
  x(time) { return GUTTER + (time - this.start) / (this.end - this.start) * this.plot; }
  time(x) { return this.start + (x - GUTTER) / this.plot * (this.end - this.start); }

  // All of a new window; of one that is there already, what has changed since.
  async load() {
    if (!this.now) return; // which window to ask for comes with the first figures
    if (this.loading || this.closed) { this.again = true; return; }
    this.loading = true;
    clearTimeout(this.soon);
    const old = this.data, { width, count } = this.asked = this.wanted, first = Math.max(Math.floor(this.scroll / this.row) - 8, 0);
    const same = old && old.width === width && old.first === first && old.count === count && old.start_s <= this.start && this.end <= old.end_s
      && Math.abs((old.end_s - old.start_s) / (this.end - this.start) - 2) < 0.1 && old.now_s - old.full_s < RELOAD_S;
    const pad = (this.end - this.start) / 2;
    const query = new URLSearchParams({ start: same ? old.start_s : this.start - pad, end: same ? old.end_s : this.end + pad, width, first, count, names: old?.names ?? "" });
    if (same) query.set("since", old.now_s - SETTLED_S);
    try {
      const found = await ask(`timeline?${query}`);
      const data = { ...found, lanes: found.lanes ?? old.lanes, jobs: found.jobs ?? old.jobs, width, count, full_s: same ? old.full_s : found.now_s };
      if (same) data.rows = found.rows.map((row, at) => ({ rents: row.rents, spans: extended(old.rows[at]?.spans ?? [], row.spans, found.since_s) }));
      this.data = data;
      if (found.jobs) this.named?.(); // jobs have their colours now
      if (this.laneCount !== data.lanes.length) { this.laneCount = data.lanes.length; this.resize(); }
      this.draw();
    } catch (error) { if (error.status === 401) this.close(); }
    this.loading = false;
    if (this.again) { this.again = false; this.load(); }
  }

  async loadMap() {
    try { this.overview = await ask("overview"); this.draw(); } catch { /* the next one may come */ }
  }

  resize() {
    const height = Math.min(Math.max(this.laneCount * this.row, 48), 432) + AXIS;
    this.canvas.style.height = `${height}px`;
    this.width = this.canvas.clientWidth; // asking for it between two drawings would lay the page out
    this.height = this.canvas.clientHeight;
    for (const canvas of [this.canvas, this.map]) {
      canvas.width = Math.round(canvas.clientWidth * devicePixelRatio);
      canvas.height = Math.round(canvas.clientHeight * devicePixelRatio);
    }
    this.draw();
    const { width, count } = this.wanted;
    if (this.asked && (width !== this.asked.width || count !== this.asked.count)) this.loadSoon();
  }

  draw() {
    if (this.drawing) return;
    this.drawing = requestAnimationFrame(() => { this.drawing = 0; this.paint(); this.paintMap(); });
  }

  paint() {
    const c = this.canvas.getContext("2d");
    c.setTransform(devicePixelRatio, 0, 0, devicePixelRatio, 0, 0);
    const { width, height } = this;
    c.clearRect(0, 0, width, height);
    this.paintAxis(c, width, height);
    if (!this.data) return;
    c.save();
    c.beginPath(); c.rect(0, AXIS, width, height - AXIS); c.clip();
    const { first, rows } = this.data;
    let pool = null;
    for (let at = 0; at < rows.length; at++) {
      const y = AXIS + (first + at) * this.row - this.scroll;
      const lane = this.lanes[first + at];
      if (!lane || y > height || y + this.row < AXIS) { pool = lane?.[1] ?? pool; continue; }
      this.paintLane(c, rows[at], y, lane, lane[1] !== pool);
      pool = lane[1];
    }
    c.restore();
    if (this.live && this.end >= this.now) { c.fillStyle = css("--accent"); c.fillRect(this.x(this.now), AXIS - 4, 1, height); }
    const range = `${this.lanes.length} lanes · ${seconds(this.end - this.start)} of ${seconds(this.now)}`;
    if (this.range.textContent !== range) this.range.textContent = range;
  }

  paintAxis(c, width, height) {
    const span = this.end - this.start;
    const step = [0.01, 0.05, 0.1, 0.5, 1, 2, 5, 10, 30, 60, 120, 300, 600, 1800, 3600, 7200, 21600, 43200, 86400, 172800, 604800].find((s) => s >= span / (this.plot / 90)) ?? 2592000;
    c.font = "11px system-ui, sans-serif"; c.textBaseline = "middle";
    for (let time = Math.ceil(Math.max(this.start, 0) / step) * step; time <= this.end; time += step) {
      const x = this.x(time);
      c.fillStyle = css("--line"); c.fillRect(x, AXIS - 4, 1, height - AXIS + 4);
      const label = clock(time, step);
      c.fillStyle = css("--muted");
      if (x + 4 + c.measureText(label).width <= width) c.fillText(label, x + 4, AXIS / 2); // never half of one
    }
  }

  paintLane(c, row, y, [name, pool], begins) {
    const top = y + 1.5, tall = this.row - 3;
    if (begins) { c.fillStyle = css("--line"); c.fillRect(0, y - 0.5, this.width, 1); }
    c.fillStyle = css("--bubble");
    const left = GUTTER, right = this.width;
    const box = (a, b, at, height) => { const x = Math.max(this.x(a), left), end = Math.min(this.x(b), right); if (end > x) c.fillRect(x, at, Math.max(end - x, 1), height); return [x, end]; };
    for (const [since, until] of row.rents) box(since, this.live && until >= this.data.now_s ? this.now : until, top, tall);
    const s = row.spans;
    for (let i = 0; i < s.length; i += 5) {
      const kind = KINDS[s[i + 3]], job = this.data.jobs[s[i + 2]];
      if (kind === "fault") { this.paintFault(c, this.x(s[i]), top + tall / 2); continue; }
      c.globalAlpha = (this.only && job !== this.only ? 0.14 : 1) * (0.3 + 0.7 * s[i + 4] / 100);
      c.fillStyle = kind === "switch" ? css("--switch") : this.byPhase ? css(`--${kind}`) : jobColor(s[i + 2], kind);
      const open = s[i + 1] >= this.data.now_s - 1e-3 && this.live ? this.now : s[i + 1];
      const thin = kind === "sync" ? [top + tall * 0.3, tall * 0.4] : kind === "tail" ? [top + tall * 0.62, tall * 0.38] : [top, tall];
      const [x, end] = box(s[i], open, ...thin);
      if (end - x > 64 && tall >= 12 && kind !== "switch" && job && (this.only ?? job) === job && s[i + 4] === 100) this.paintName(c, job, kind, x, end, top + tall / 2);
      c.globalAlpha = 1;
    }
    if (this.row >= 10) {
      c.fillStyle = css("--panel"); c.fillRect(0, y, GUTTER - 4, this.row);
      c.fillStyle = begins ? css("--ink") : css("--muted"); c.font = `${Math.min(Math.max(this.row - 4, 9), 11.5)}px system-ui, sans-serif`;
      c.fillText(name.length > 21 ? `${name.slice(0, 20)}…` : name, 2, y + this.row / 2, GUTTER - 10);
    }
  }

  paintName(c, job, kind, x, end, y) {
    c.fillStyle = kind === "rollout" ? "#fff" : "#0b1220"; c.font = "11px system-ui, sans-serif";
    const text = shortJob(job), room = Math.floor((end - x - 10) / 6.2);
    c.fillText(text.length > room ? `${text.slice(0, room - 1)}…` : text, x + 5, y);
  }

  paintFault(c, x, y) {
    if (x < GUTTER) return;
    c.fillStyle = css("--bad"); c.beginPath();
    c.moveTo(x, y - 5); c.lineTo(x + 5, y); c.lineTo(x, y + 5); c.lineTo(x - 5, y); c.fill();
  }

  paintMap() {
    const c = this.map.getContext("2d");
    c.setTransform(devicePixelRatio, 0, 0, devicePixelRatio, 0, 0);
    const width = this.width, height = MAP;
    c.clearRect(0, 0, width, height);
    const series = this.overview?.series ?? {}, total = Math.max(this.now, this.overview?.end_s ?? 0, 1e-3);
    const bins = Object.values(series)[0]?.length ?? 0, below = new Float64Array(bins);
    const reach = (this.overview?.end_s ?? total) / total * (width - GUTTER);
    c.fillStyle = css("--bubble"); c.fillRect(GUTTER, 0, width - GUTTER, height);
    for (const kind of ["train", "rollout", "sync"]) {
      c.fillStyle = css(`--${kind}`);
      (series[kind] ?? []).forEach((share, at) => {
        const tall = Math.min(share, 1 - below[at]) * height;
        c.fillRect(GUTTER + at / bins * reach, height - below[at] * height - tall, reach / bins + 0.5, tall);
        below[at] += share;
      });
    }
    const x = (time) => GUTTER + Math.max(Math.min(time / total, 1), 0) * (width - GUTTER);
    c.fillStyle = css("--veil");
    c.fillRect(GUTTER, 0, x(this.start) - GUTTER, height); c.fillRect(x(this.end), 0, width - x(this.end), height);
    c.strokeStyle = css("--accent"); c.strokeRect(x(this.start) + 0.5, 0.5, Math.max(x(this.end) - x(this.start) - 1, 2), height - 1);
    c.fillStyle = css("--muted"); c.font = "11px system-ui, sans-serif"; c.textBaseline = "middle";
    const mean = bins ? below.reduce((sum, share) => sum + Math.min(share, 1), 0) / bins : 0;
    c.fillText(bins ? `whole run, ${(100 * mean).toFixed(0)} % busy` : "whole run", 2, height / 2, GUTTER - 8);
  }

  listen() {
    const canvas = this.canvas;
    canvas.addEventListener("wheel", (event) => {
      event.preventDefault();
      if (event.shiftKey || event.offsetX < GUTTER) this.scrollBy(event.deltaY || event.deltaX);
      else if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) { this.follow = false; this.pan(event.deltaX); }
      else this.zoom(Math.exp(Math.max(Math.min(event.deltaY, 240), -240) / 300), this.time(event.offsetX));
    }, { passive: false });
    canvas.addEventListener("pointerdown", (event) => { canvas.setPointerCapture(event.pointerId); this.drag = { x: event.offsetX, y: event.offsetY, moved: 0 }; });
    canvas.addEventListener("pointermove", (event) => {
      if (!this.drag) { this.point(event); return; }
      const dx = event.offsetX - this.drag.x, dy = event.offsetY - this.drag.y;
      this.drag = { x: event.offsetX, y: event.offsetY, moved: this.drag.moved + Math.abs(dx) + Math.abs(dy) };
      if (this.drag.moved > 4) { this.follow = false; this.tip.hidden = true; this.pan(-dx); this.scrollBy(-dy); }
    });
    canvas.addEventListener("pointerup", (event) => {
      const clicked = this.drag && this.drag.moved <= 4;
      this.drag = null;
      const found = clicked ? this.under(event.offsetX, event.offsetY) : null;
      if (found?.job && found.kind !== "fault" && !found.job.startsWith("weights of ")) this.open(found.job);
    });
    canvas.addEventListener("pointerleave", () => { this.tip.hidden = true; });
    canvas.addEventListener("dblclick", (event) => this.zoom(0.4, this.time(event.offsetX)));
    canvas.addEventListener("keydown", (event) => {
      const act = { ArrowLeft: () => this.pan(-80), ArrowRight: () => this.pan(80), ArrowUp: () => this.scrollBy(-this.row * 3), ArrowDown: () => this.scrollBy(this.row * 3), "+": () => this.zoom(0.6), "=": () => this.zoom(0.6), "-": () => this.zoom(1.6) }[event.key];
      if (act) { event.preventDefault(); if (event.key.startsWith("Arrow")) this.follow = false; act(); }
    });
    const jump = (event) => {
      const time = (event.offsetX - GUTTER) / (this.width - GUTTER) * Math.max(this.now, 1e-3), half = (this.end - this.start) / 2;
      this.follow = false; this.setWindow(time - half, time + half);
    };
    this.map.addEventListener("pointerdown", (event) => { this.map.setPointerCapture(event.pointerId); jump(event); });
    this.map.addEventListener("pointermove", (event) => { if (event.buttons) jump(event); });
  }

  pan(pixels) { const by = pixels / this.plot * (this.end - this.start); this.setWindow(this.start + by, this.end + by); }

  scrollBy(pixels) {
    const most = Math.max(this.laneCount * this.row - (this.height - AXIS), 0);
    const next = Math.max(Math.min(this.scroll + pixels, most), 0);
    if (next === this.scroll) return;
    this.scroll = next; this.draw();
    this.loadSoon();
  }

  under(x, y) {
    if (!this.data || x < GUTTER || y < AXIS) return null;
    const at = Math.floor((y - AXIS + this.scroll) / this.row), row = this.data.rows[at - this.data.first], lane = this.lanes[at];
    if (!row || !lane) return null;
    const time = this.time(x), near = (this.end - this.start) / this.plot * 5, s = row.spans;
    for (let i = s.length - 5; i >= 0; i -= 5) {
      const slack = KINDS[s[i + 3]] === "fault" ? near : near / 5;
      if (s[i] - slack <= time && time <= s[i + 1] + slack) return { lane: lane[0], pool: lane[1], job: this.data.jobs[s[i + 2]], kind: KINDS[s[i + 3]], from: s[i], to: s[i + 1], share: s[i + 4] };
    }
    const rented = row.rents.some(([since, until]) => since <= time && time <= until);
    return { lane: lane[0], pool: lane[1], kind: rented ? "bubble: here, and idle" : "not here" };
  }

  point(event) {
    const found = this.under(event.offsetX, event.offsetY);
    this.tip.hidden = !found;
    this.canvas.style.cursor = found?.job && found.kind !== "fault" ? "pointer" : "grab";
    if (!found) return;
    const when = found.from === undefined ? "" : `${clock(found.from, 0.1)} for ${seconds(found.to - found.from)}${found.share < 100 ? `, ${found.share} % busy` : ""}`;
    fill(this.tip, h("b", {}, found.job ? shortJob(found.job) : found.kind), h("span", {}, found.job ? found.kind : ""), h("span", {}, `${found.lane} (${found.pool})`), when ? h("span", {}, when) : null);
    const width = this.tip.offsetWidth;
    this.tip.style.left = `${Math.min(event.offsetX + 14, this.width - width - 4)}px`;
    this.tip.style.top = `${event.offsetY + 14}px`;
  }
}

// Spans that had ended by then, and those that came since.
function extended(old, more, since) {
  const kept = [];
  for (let i = 0; i < old.length; i += 5) if (old[i + 1] <= since + 1e-6) kept.push(old[i], old[i + 1], old[i + 2], old[i + 3], old[i + 4]);
  return kept.concat(more);
}

function clock(time, step) {
  const days = Math.floor(time / 86400), rest = time - days * 86400;
  const hh = Math.floor(rest / 3600), mm = Math.floor(rest % 3600 / 60), ss = rest % 60;
  const two = (value) => String(value).padStart(2, "0");
  if (step >= 86400) return `day ${days}`;
  const day = days ? `${days}d ` : "";
  if (step >= 60) return `${day}${hh}:${two(mm)}`;
  return `${day}${hh ? `${hh}:` : ""}${hh ? two(mm) : mm}:${step < 1 ? ss.toFixed(step < 0.1 ? 2 : 1).padStart(step < 0.1 ? 5 : 4, "0") : two(Math.round(ss))}`;
}
