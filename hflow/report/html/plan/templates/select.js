"use strict";
// What the reader points at and what is kept. A reference is "node:actor_gen", "edge:e3", "device:5" ...
const page = { kept: null, shown: null, listeners: [] };
const byRef = (ref) => document.querySelectorAll(`[data-ref="${CSS.escape(ref)}"]`);
const kindOf = (ref) => ref.slice(0, ref.indexOf(":"));
const nameOf = (ref) => ref.slice(ref.indexOf(":") + 1);

function show(ref) {
  if (page.shown === ref) return;
  page.shown = ref;
  for (const listener of page.listeners) listener(ref);
}

function keep(ref, target) {
  page.kept = page.kept === ref ? null : ref;
  for (const button of document.querySelectorAll("[data-ref][aria-pressed]")) {
    button.setAttribute("aria-pressed", String(button.dataset.ref === page.kept));
  }
  openDetails(page.kept, target);
  show(page.kept);
}

const refAt = (target) => target.closest?.("[data-ref]")?.dataset.ref ?? null;

document.addEventListener("pointerover", (event) => {
  const ref = refAt(event.target);
  show(ref && !event.target.closest(".panel") ? ref : page.kept);
});
document.addEventListener("focusin", (event) => {
  const ref = refAt(event.target);
  if (ref && event.target.matches(":focus-visible") && !event.target.closest(".panel")) show(ref);
});
document.addEventListener("click", (event) => {
  const target = event.target.closest?.("[data-ref], [data-jump]");
  if (!target) return;
  if (target.dataset.ref) keep(target.dataset.ref, target);
  if (target.dataset.jump && page.kept) document.getElementById(target.dataset.jump).scrollIntoView();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && page.kept) keep(page.kept);
  if ((event.key === "Enter" || event.key === " ") && event.target.matches("g[data-ref]")) {
    event.preventDefault();
    keep(event.target.dataset.ref, event.target);
  }
});

// The graph: what is chosen stands out with its neighbours, the rest steps back.
const dag = document.getElementById("dag");
const templates = [...document.querySelectorAll("template[data-detail]")];
const details = new Map(templates.map((template) => [template.dataset.detail, template]));

function edgesOf(ref) {
  const edges = [...dag.querySelectorAll(".edge")];
  if (kindOf(ref) === "edge") return edges.filter((edge) => edge.dataset.ref === ref);
  const name = nameOf(ref);
  return edges.filter((edge) => {
    const hidden = [...edge.classList].some((kind) => dag.classList.contains(`hide-${kind.slice(5)}`));
    return !hidden && (edge.dataset.src === name || edge.dataset.dst === name);
  });
}

function focusGraph(ref) {
  const before = dag.querySelectorAll(".is-focus, .is-near");
  for (const element of before) element.classList.remove("is-focus", "is-near");
  const known = ref !== null && dag.querySelector(`[data-ref="${CSS.escape(ref)}"]`) !== null;
  dag.classList.toggle("has-focus", known);
  if (!known) return;
  const ids = new Set();
  for (const edge of edgesOf(ref)) {
    edge.classList.add(edge.dataset.ref === ref ? "is-focus" : "is-near");
    edge.parentNode.append(edge);
    ids.add(nameOf(edge.dataset.ref));
    for (const end of [edge.dataset.src, edge.dataset.dst]) {
      dag.querySelector(`.node[data-ref="${CSS.escape(`node:${end}`)}"]`).classList.add("is-near");
    }
  }
  dag.querySelector(`.node[data-ref="${CSS.escape(ref)}"]`)?.classList.add("is-focus");
  for (const label of dag.querySelectorAll(".lane-labels text")) {
    label.classList.toggle("is-near", label.dataset.edges.split(" ").some((id) => ids.has(id)));
  }
}

// The details of what is kept, docked beside the page. What the reader chose stays where it is in the window.
const panel = document.getElementById("panel");
const panelBody = document.getElementById("panel-body");

function openDetails(ref, target) {
  const template = details.get(ref);
  const before = target?.getBoundingClientRect().top;
  panel.hidden = template === undefined;
  document.body.classList.toggle("has-panel", template !== undefined);
  if (template) panelBody.replaceChildren(template.content.cloneNode(true));
  panel.scrollTop = 0;
  if (!target?.isConnected || target.closest(".panel")) return;
  window.scrollBy({ top: target.getBoundingClientRect().top - before, behavior: "instant" });
  if (!target.matches(".edge")) target.scrollIntoView({ block: "nearest", inline: "nearest", behavior: "instant" });
}
document.getElementById("panel-close").addEventListener("click", () => page.kept && keep(page.kept));

page.listeners.push(focusGraph, (ref) => {
  for (const bar of document.querySelectorAll(".bar.is-focus")) bar.classList.remove("is-focus");
  if (ref) for (const bar of byRef(ref)) if (bar.matches(".bar")) bar.classList.add("is-focus");
});

for (const toggle of document.querySelectorAll("[data-edges].toggle")) {
  toggle.addEventListener("click", () => {
    const hidden = dag.classList.toggle(`hide-${toggle.dataset.edges}`);
    toggle.setAttribute("aria-pressed", String(!hidden));
  });
}
