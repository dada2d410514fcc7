// The shell: login, navigation, and the figures that come once a second.

import { ask, fill, h, setCsrf, whenReleased } from "./dom.js";
import { FleetView } from "./fleet.js";

const app = document.getElementById("app");
const state = { session: null, snapshot: null, view: null, source: null };

function route() {
  const [name, ...rest] = location.hash.slice(1).split(":");
  const argument = decodeURIComponent(rest.join(":"));
  if (name === "job" && argument) return { name, argument };
  return { name: name === "what-if" ? name : "fleet", argument: "" };
}

export const go = (name, argument) => { location.hash = argument ? `${name}:${encodeURIComponent(argument)}` : name; };

// Only the fleet's view is there from the start: the others, and what draws curves, come when opened.
const VIEWS = {
  fleet: async () => FleetView,
  job: async () => (await import("./job.js")).JobView,
  "what-if": async () => (await import("./what_if.js")).WhatIfView,
};

async function show() {
  const { name, argument } = route(), shown = location.hash;
  const View = await VIEWS[name]();
  if (location.hash !== shown || !document.querySelector("nav")) return; // another was asked for meanwhile
  state.view?.close?.();
  const context = { session: state.session, go, snapshot: () => state.snapshot };
  const place = h("main", {});
  state.view = name === "job" ? new View(place, argument, context) : new View(place, context);
  for (const link of document.querySelectorAll("nav a")) link.classList.toggle("here", link.dataset.view === name);
  document.querySelector("main")?.replaceWith(place);
  if (state.snapshot) state.view.update(state.snapshot);
}

function shell() {
  const link = (name, text) => h("a", { href: `#${name}`, "data-view": name }, text);
  const live = state.session.mode === "live";
  fill(app,
    h("header", { class: "top" },
      h("a", { class: "brand", href: "#fleet" }, h("img", { src: "/dashboard/static/icon.svg", alt: "" }), "slackwater"),
      h("nav", {}, link("fleet", "Fleet"), state.session.operator ? link("what-if", "What if") : null),
      h("span", { id: "problems" }),
      h("span", { id: "pulse", class: live ? "pulse" : "pulse off", title: live ? "live" : "a recorded run" }, live ? "live" : "recording"),
      h("span", { class: "who" }, state.session.operator ? (live ? "operator" : "") : state.session.tenant),
      live ? h("button", { class: "quiet", onclick: logout }, "Log out") : null),
    h("main", {}));
  show();
}

function listen() {
  state.source?.close();
  const source = new EventSource("/dashboard/api/events");
  state.source = source;
  const pulse = (text, lost) => {
    const place = document.getElementById("pulse");
    if (place) { place.textContent = text; place.classList.toggle("lost", lost); }
  };
  source.addEventListener("snapshot", (event) => {
    state.snapshot = JSON.parse(event.data);
    pulse(state.session.mode === "live" ? "live" : "recording", false);
    problems(state.snapshot.problems);
    whenReleased("figures", () => state.view?.update(state.snapshot));
  });
  source.addEventListener("end", () => { source.close(); start(); });
  source.onerror = () => {
    pulse("reconnecting", true);
    if (source.readyState === EventSource.CLOSED) setTimeout(start, 2000);
  };
}

function problems(lines) {
  const place = document.getElementById("problems");
  fill(place, lines.length ? h("span", { class: "problem", title: lines.join("\n") }, `⚠ ${lines[0]}${lines.length > 1 ? ` (+${lines.length - 1})` : ""}`) : null);
}

async function logout() {
  state.source?.close();
  await ask("logout", { post: true }).catch(() => undefined);
  login();
}

function login(said) {
  state.view?.close?.();
  state.view = null;
  const key = h("input", { type: "password", name: "key", placeholder: "tml-…", autocomplete: "current-password", "aria-label": "API key", autofocus: true });
  const enter = async (event) => {
    event.preventDefault();
    try { begin(await ask("login", { body: { key: key.value } })); } catch (error) { login(error.message); }
  };
  fill(app, h("form", { class: "login", onsubmit: enter },
    h("img", { src: "/dashboard/static/icon.svg", alt: "" }), h("h1", {}, "slackwater"),
    h("p", {}, "Log in with an API key that ", h("code", {}, "slackwater up"), " printed. Tenants see their jobs, the operator sees the fleet."),
    key, h("button", {}, "Log in"), said ? h("p", { class: "error", role: "alert" }, said) : null));
  key.focus();
}

function begin(session) {
  state.session = session;
  setCsrf(session.csrf);
  shell();
  listen();
}

async function start() {
  // Only a recording of this machine prints its key in an address; elsewhere a person enters it.
  const given = location.hostname === "127.0.0.1" ? /^#key=([\w-]+)$/.exec(location.hash) : null;
  if (location.hash.startsWith("#key=")) history.replaceState(null, "", location.pathname);
  try {
    begin(await (given ? ask("login", { body: { key: given[1] } }) : ask("session")));
  } catch (error) {
    if (error.status === 401) login(given ? error.message : undefined);
    else setTimeout(start, 2000);
  }
}

addEventListener("hashchange", () => { if (state.session && document.querySelector("nav")) show(); });
start();
