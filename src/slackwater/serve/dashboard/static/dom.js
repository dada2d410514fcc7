// Elements and requests. Text always becomes a text node, so a name with markup in it stays a name.

export function h(tag, props, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(props ?? {})) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (name === "class") made.className = value;
    else if (name === "width") made.style.width = value; // CSSOM: allowed by the policy
    else made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return made;
}

// What a person has scrolled to and focused inside stays so: figures are filled in anew every second.
export function fill(place, ...children) {
  const scrolled = [...place.querySelectorAll(".scroll")].map((one) => one.dataset.scrolled ?? 0); // scrollTop would lay the page out
  const kept = place.contains(document.activeElement) ? keyOf(document.activeElement) : undefined;
  place.replaceChildren(...children.flat().filter((child) => child !== null && child !== undefined));
  if (scrolled.some(Boolean)) [...place.querySelectorAll(".scroll")].forEach((one, at) => { one.scrollTop = one.dataset.scrolled = scrolled[at] ?? 0; });
  if (kept) [...place.querySelectorAll("[tabindex]")].find((one) => keyOf(one) === kept)?.focus({ preventScroll: true });
  return place;
}
addEventListener("scroll", ({ target }) => { if (target.classList?.contains("scroll")) target.dataset.scrolled = target.scrollTop; }, { capture: true, passive: true });
const keyOf = (element) => element.dataset.job ?? element.dataset.trajectory;

// Between a press and its release nothing is replaced, or the click would be nobody's.
let pressed = false, waiting = new Map();
addEventListener("pointerdown", () => { pressed = true; });
for (const over of ["pointerup", "pointercancel", "blur"]) {
  addEventListener(over, () => setTimeout(() => {
    pressed = false;
    const due = waiting;
    waiting = new Map();
    for (const act of due.values()) act();
  }));
}
export function whenReleased(name, act) {
  if (pressed) waiting.set(name, act);
  else act();
}

export const panel = (title, note, ...children) =>
  h("section", { class: "panel" }, h("header", {}, h("h2", {}, title), note ? h("span", { class: "note" }, note) : null), ...children);

// One row per line; cells are text or elements. A column that begins with ">" is right-aligned.
export function table(columns, rows, empty) {
  if (!rows.length) return h("p", { class: "empty" }, empty);
  const names = columns.map((name) => name.replace(/^>/, ""));
  const right = columns.map((name) => name.startsWith(">"));
  const cell = (tag, value, at) => h(tag, { class: right[at] ? "right" : undefined }, value ?? "");
  return h("div", { class: "scroll" }, h("table", {},
    h("thead", {}, h("tr", {}, names.map((name, at) => cell("th", name, at)))),
    h("tbody", {}, rows.map((row) => h("tr", row.props ?? {}, (row.cells ?? row).map((value, at) => cell("td", value, at)))))));
}

export const bar = (share, kind) =>
  h("span", { class: "bar" }, h("i", { class: kind, width: `${Math.max(0, Math.min(share, 1)) * 100}%` }));

export const pill = (stage) => h("span", { class: `pill ${stage}` }, stage);

export function card(name, value, detail, kind) {
  return h("div", { class: `card ${kind ?? ""}` }, h("span", { class: "name" }, name), h("b", {}, value), h("span", { class: "detail" }, detail ?? ""));
}

export const shortJob = (job) => (job ?? "").includes("/") ? job.slice(job.indexOf("/") + 1) : (job ?? "");

export function seconds(value) {
  if (value === null || value === undefined) return "";
  const s = Math.abs(value);
  if (s < 10) return `${value.toFixed(1)} s`;
  if (s < 120) return `${value.toFixed(0)} s`;
  if (s < 7200) return `${(value / 60).toFixed(0)} min`;
  if (s < 172800) return `${(value / 3600).toFixed(1)} h`;
  return `${(value / 86400).toFixed(1)} d`;
}

export function count(value) {
  if (value === null || value === undefined) return "";
  if (Math.abs(value) >= 1e9) return `${(value / 1e9).toFixed(1)} G`;
  if (Math.abs(value) >= 1e6) return `${(value / 1e6).toFixed(1)} M`;
  if (Math.abs(value) >= 1e4) return `${(value / 1e3).toFixed(1)} k`;
  return Number.isInteger(value) ? String(value) : value.toFixed(2);
}

export const percent = (share) => `${(100 * share).toFixed(0)} %`;

// A canvas asks for colours thousands of times a frame; looking one up makes the browser restyle the page.
function remembered(make) {
  const known = new Map();
  matchMedia("(prefers-color-scheme: light)").addEventListener("change", () => known.clear());
  return (name, kind) => {
    const key = kind === undefined ? name : `${name} ${kind}`;
    if (!known.has(key)) known.set(key, make(name, kind));
    return known.get(key);
  };
}
export const css = remembered((name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim());

// Twelve hues that stay apart; further jobs take them again, lighter.
const HUES = [188, 28, 145, 350, 265, 48, 210, 320, 95, 12, 235, 168];
export const jobColor = remembered((number, kind) => {
  const round = Math.floor(number / HUES.length);
  const light = { rollout: 46, train: 62, sync: 74, tail: 54 }[kind] ?? 58;
  const pale = kind === "rollout" ? 42 : 62;
  return `hsl(${HUES[number % HUES.length]} ${pale - 8 * (round % 3)}% ${light + 7 * (round % 2)}%)`;
});

let csrf = "";
export const setCsrf = (token) => { csrf = token; };

export async function ask(path, options = {}) {
  const method = options.body === undefined && !options.post ? "GET" : "POST";
  const headers = method === "POST" ? { "x-csrf-token": csrf, "content-type": "application/json" } : {};
  const body = method === "POST" ? JSON.stringify(options.body ?? {}) : undefined;
  const answer = await fetch(`/dashboard/api/${path}`, { method, headers, body, credentials: "same-origin", signal: options.signal });
  const said = await answer.json().catch(() => ({}));
  if (answer.ok) return said;
  const error = new Error(said.detail ?? `${answer.status}`);
  error.status = answer.status;
  throw error;
}
