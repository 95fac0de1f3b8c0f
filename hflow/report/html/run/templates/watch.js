// `hflow watch`: fetches the page again, and replaces the sections that have changed.
const POLL_SECONDS = 2;
const watchPage = location.pathname;

// Chosen colours, searches, what is open, and how far parts are scrolled stay as they are.
function replaceSection(old, fresh) {
  const within = (selector) => [old, fresh].map((part) => [...part.querySelectorAll(selector)]);
  const [oldOpen, newOpen] = within("details");
  newOpen.forEach((part, i) => { part.open = oldOpen[i]?.open ?? part.open; });
  const [oldInputs, newInputs] = within("input");
  newInputs.forEach((part, i) => { part.value = oldInputs[i]?.value ?? ""; });
  const chosen = old.querySelector('[data-colour][aria-pressed="true"]')?.dataset.colour;
  const chips = [...fresh.querySelectorAll("[data-colour]")];
  if (chips.some((chip) => chip.dataset.colour === chosen)) {
    chips.forEach((chip) => chip.setAttribute("aria-pressed", String(chip.dataset.colour === chosen)));
  }
  const [oldParts, newParts] = within(".scroll, .sample-list");
  const scrolls = oldParts.map((part) => [part.scrollLeft, part.scrollTop, nameAtTop(part)]);
  const focused = document.activeElement;
  const cursor = old.contains(focused) && focused.id ? [focused.id, focused.selectionStart] : undefined;
  old.replaceWith(fresh);
  setUps[fresh.id]?.();
  newParts.forEach((part, i) => {
    wideParts.observe(part);
    if (!scrolls[i]) return;
    [part.scrollLeft, part.scrollTop] = scrolls[i];
    if (part.scrollTop > 0) stayAt(part, scrolls[i][2]);
  });
  if (cursor) {
    const again = document.getElementById(cursor[0]);
    again?.focus({ preventScroll: true });
    if (cursor[1] != null) again?.setSelectionRange?.(cursor[1], cursor[1]);
  }
}

// The sample at the top of a list that is scrolled, and how far its top is from that of the list.
function nameAtTop(list) {
  const top = list.getBoundingClientRect().top;
  const first = [...list.querySelectorAll(".sample")].find((one) => one.getBoundingClientRect().bottom > top);
  return first && [first.querySelector(".sample-name").textContent, first.getBoundingClientRect().top - top];
}

function stayAt(list, place) {
  const same = place && [...list.querySelectorAll(".sample")].find(
    (one) => one.querySelector(".sample-name").textContent === place[0],
  );
  if (same) list.scrollTop += same.getBoundingClientRect().top - list.getBoundingClientRect().top - place[1];
}

// What a reader points at, or has marked, must not go away.
function isRead(section) {
  const marked = getSelection();
  return section.querySelector("[data-tip]:hover, .plot.is-read") !== null
    || (!marked.isCollapsed && section.contains(marked.anchorNode));
}

function showWatchState(text) {
  const line = document.getElementById("watch-state");
  if (!line) return;
  line.textContent = text;
  line.hidden = text === "";
}

let pageTag = "";
async function update() {
  const answer = await fetch(watchPage, { headers: pageTag ? { "If-None-Match": pageTag } : {}, cache: "no-store" });
  if (answer.status === 304) return showWatchState("");
  const text = await answer.text();
  if (!answer.ok) return showWatchState(text);
  const page = new DOMParser().parseFromString(text, "text/html");
  const points = page.getElementById("data").textContent;
  curvePoints = JSON.parse(points);
  let isWhole = true;
  for (const fresh of page.querySelectorAll("section")) {
    const id = fresh.id || "top";
    const html = fresh.outerHTML;
    if (html === sentSections.get(id)) continue;
    const old = document.querySelector(id === "top" ? "section.top" : `#${id}`);
    if (isRead(old)) { isWhole = false; continue; }
    sentSections.set(id, html);
    replaceSection(old, document.adoptNode(fresh));
  }
  if (isWhole) pageTag = answer.headers.get("ETag") ?? "";
  else pageTag = "";
  return showWatchState("");
}

async function follow() {
  if (!document.hidden) {
    try {
      await update();
    } catch (error) {
      showWatchState("hflow watch does not answer: it has ended, or the connection is lost. Start it again to go on.");
    }
  }
  setTimeout(follow, POLL_SECONDS * 1000);
}
setTimeout(follow, POLL_SECONDS * 1000);
