// The device grid: which devices a replica, a node or a route between devices uses.
const data = JSON.parse(document.getElementById("data").textContent);
const grid = document.getElementById("grid");
const squares = [...grid.querySelectorAll(".device")];
const readout = document.getElementById("readout");
const readoutHint = readout.innerHTML;
const arcs = document.getElementById("arcs");
const MOST_ARCS = 48;
const machineOf = (device) => Math.floor(device / data.devices.per_machine);
const replicas = new Map(data.devices.replicas.map((replica) => [replica.name, replica]));
const routes = new Map(data.devices.routes.map((route) => [route.id, route]));
const sets = data.devices.sets.map((runs) => {
  const devices = new Set();
  for (const [first, last] of runs) for (let i = first; i <= last; i += 1) devices.add(i);
  return devices;
});

function element(name, text, className) {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  if (className) made.className = className;
  return made;
}

function facts(rows) {
  const list = element("dl");
  for (const [name, value] of rows) list.append(element("dt", name), element("dd", value));
  return list;
}

// From whom a device takes: on its own machine where a holder is there and the route prefers it.
function sources(route, [holders, receivers], device) {
  const held = sets[holders];
  if (!sets[receivers].has(device) || held.has(device)) return [];
  const near = route.is_near ? [...held].filter((other) => machineOf(other) === machineOf(device)) : [];
  return near.length ? near : [...held];
}

// Pairs [from, to] of a route: all of them, or those that one device has a part in.
function pairs(route, only) {
  const found = new Map();
  for (const flow of route.flows) {
    const takesOnly = only !== undefined && !sets[flow[0]].has(only);
    for (const to of takesOnly ? [only] : sets[flow[1]]) {
      for (const from of sources(route, flow, to)) {
        if (only === undefined || from === only || to === only) found.set(`${from} ${to}`, [from, to]);
        if (only === undefined && found.size > MOST_ARCS) return found;
      }
    }
  }
  return found;
}

function coordsText(replica, rank) {
  const [d, t, p, c] = replica.coords[rank];
  const hasContext = replica.coords.some((coords) => coords[3]);
  return `d${d} t${t} p${p}` + (hasContext ? ` c${c}` : "");
}

function clearGrid() {
  grid.classList.remove("has-focus");
  for (const square of squares) {
    square.classList.remove("is-in", "is-head", "sends", "receives", "is-focus");
    const coords = square.querySelector(".coords");
    if (coords) coords.textContent = "";
  }
  arcs.replaceChildren();
}

function mark(devices, ...classes) {
  for (const device of devices) squares[device].classList.add(...classes);
}

function drawArcs(found) {
  const box = grid.getBoundingClientRect();
  const centre = (device) => {
    const at = squares[device].getBoundingClientRect();
    return [at.left + at.width / 2 - box.left, at.top + at.height / 2 - box.top];
  };
  const each = Math.ceil(found.size / MOST_ARCS);
  for (const [from, to] of [...found.values()].filter((_, i) => i % each === 0)) {
    const [x1, y1] = centre(from);
    const [x2, y2] = centre(to);
    const lift = Math.min(60, 14 + Math.hypot(x2 - x1, y2 - y1) / 6);
    const path = document.createElementNS(arcs.namespaceURI, "path");
    path.setAttribute("d", `M${x1} ${y1}Q${(x1 + x2) / 2} ${(y1 + y2) / 2 - lift} ${x2} ${y2}`);
    const end = document.createElementNS(arcs.namespaceURI, "circle");
    for (const [key, value] of [["cx", x2], ["cy", y2], ["r", 3]]) end.setAttribute(key, value);
    arcs.append(path, end);
  }
}

function showReplica(replica) {
  grid.classList.add("has-focus");
  mark(replica.workers, "is-in");
  mark(replica.heads, "is-head");
  const numStages = 1 + Math.max(...replica.coords.map(([, , p]) => p));
  replica.workers.forEach((device, rank) => {
    const [d, , p] = replica.coords[rank];
    squares[device].style.setProperty("--tone", numStages > 1 ? p / (numStages - 1) : d % 2);
    const coords = squares[device].querySelector(".coords");
    if (coords) coords.textContent = coordsText(replica, rank);
  });
  readout.replaceChildren(element("b", replica.name), facts([
    ["layout", replica.layout], ["group", replica.group], ["runs on", replica.size],
    ["dp-heads", `${replica.heads.length}, with a dot: they receive the samples`],
    ["shade", numStages > 1 ? "pipeline stage, the last one strongest" : "every other data rank"],
  ]));
}

function showRoute(route, device) {
  grid.classList.add("has-focus");
  const found = pairs(route, device);
  if (device === undefined) {
    const [senders, takers] = [new Set(), new Set()];
    for (const [holders, receivers] of route.flows) {
      for (const from of sets[holders]) senders.add(from);
      for (const to of sets[receivers]) if (!sets[holders].has(to)) takers.add(to);
    }
    mark(senders, "sends");
    mark(takers, "receives");
  }
  if (device !== undefined) {
    for (const [from, to] of found.values()) {
      mark([from], "sends");
      mark([to], "receives");
    }
    squares[device].classList.add("is-focus");
  }
  if (device !== undefined || found.size <= MOST_ARCS) drawArcs(found);
  const title = element("b", device === undefined ? route.title : `device ${device}: ${route.title}`);
  const sends = element("p");
  sends.append(element("span", undefined, "key"), "sends  ");
  sends.append(element("span", undefined, "key to"), "receives");
  const from = [...found.values()].filter(([, to]) => to === device).length;
  const to = [...found.values()].filter(([source]) => source === device).length;
  const note = device === undefined ? route.note : `takes from ${from}, gives to ${to} devices`;
  const hint = found.size > MOST_ARCS ? "Only some of its routes are drawn." : "";
  const more = element("p", device === undefined ? "Point at a device to see its own routes." : hint, "quiet");
  readout.replaceChildren(title, element("p", note), sends, more);
}

function showDevice(device) {
  const rows = [["machine", String(machineOf(device))]];
  for (const replica of replicas.values()) {
    replica.workers.forEach((worker, rank) => {
      if (worker !== device) return;
      const head = replica.heads.includes(device) ? ", dp-head" : "";
      rows.push([replica.name, coordsText(replica, rank) + head]);
    });
  }
  if (data.devices.peaks[device]) rows.push(["peak", data.devices.peaks[device]]);
  readout.replaceChildren(element("b", `device ${device}`), facts(rows));
  squares[device].classList.add("is-focus");
}

function keptRoute() {
  return page.kept && kindOf(page.kept) === "route" ? routes.get(nameOf(page.kept)) : undefined;
}

function focusDevices(ref) {
  clearGrid();
  const kind = ref === null ? "" : kindOf(ref);
  const name = ref === null ? "" : nameOf(ref);
  if (kind === "replica") showReplica(replicas.get(name));
  else if (kind === "route") showRoute(routes.get(name));
  else if (kind === "device" && keptRoute()) showRoute(keptRoute(), Number(name));
  else if (kind === "device") showDevice(Number(name));
  else if (kind === "edge" && details.get(ref).dataset.routes) {
    showRoute(routes.get(details.get(ref).dataset.routes.split("|")[0]));
  } else readout.innerHTML = readoutHint;
}
page.listeners.push(focusDevices);
window.addEventListener("resize", () => focusDevices(page.shown));

grid.addEventListener("keydown", (event) => {
  const at = squares.indexOf(event.target);
  const row = data.devices.per_machine;
  const step = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -row, ArrowDown: row }[event.key];
  const next = step === undefined || at < 0 ? undefined : squares[at + step];
  if (!next) return;
  event.preventDefault();
  event.target.tabIndex = -1;
  next.tabIndex = 0;
  next.focus();
});

// The routing table is long, so its rows are made when it is opened.
const routing = document.getElementById("routing");
const find = document.getElementById("routing-find");
const MOST_ROWS = 2000;
function listRouting() {
  const wanted = find.value.trim().toLowerCase();
  const rows = [];
  data.routing.keys.forEach((key, i) => {
    const worker = data.routing.workers[i];
    if (`${key} ${worker}`.toLowerCase().includes(wanted)) rows.push([key, worker]);
  });
  document.getElementById("routing-count").textContent = `${rows.length.toLocaleString("en")} keys`;
  document.getElementById("routing-rows").replaceChildren(...rows.slice(0, MOST_ROWS).map(([key, worker]) => {
    const row = element("li");
    row.append(element("span", key), element("span", `→ ${worker}`, "quiet"));
    return row;
  }));
}
routing.addEventListener("toggle", () => routing.open && listRouting());
find.addEventListener("input", listRouting);
