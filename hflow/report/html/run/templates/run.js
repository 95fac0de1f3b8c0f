// Reading curves, finding metrics, colouring and finding samples.
// `hflow watch` replaces sections, and sets up what is new in them.
let curvePoints = JSON.parse(document.getElementById("data").textContent);
const PLOT_WIDTH = 360;

function shortNumber(value) {
  return Math.abs(value) >= 1e5 ? value.toLocaleString("en") : String(Number(value.toPrecision(4)));
}

function setUpCurve(figure) {
  const lines = curvePoints[figure.dataset.metric];
  const outputs = [...figure.querySelectorAll("output")];
  const plot = figure.querySelector(".plot");
  const area = plot.querySelector("svg");
  const cross = figure.querySelector(".cross");
  const atRest = outputs.map((output) => output.innerHTML);
  const last = Number(figure.querySelector(".axis span:last-child").textContent.replace(/[^0-9]/g, ""));
  plot.addEventListener("pointermove", (event) => {
    const box = area.getBoundingClientRect();
    const step = ((event.clientX - box.left) / box.width) * Math.max(1, last);
    const distance = (point) => Math.abs(point[0] - step);
    const nearest = (points) => points.reduce((best, point) => (distance(point) < distance(best) ? point : best));
    const near = lines.map(nearest);
    const x = (PLOT_WIDTH * nearest(near)[0]) / Math.max(1, last);
    cross.setAttribute("x1", x);
    cross.setAttribute("x2", x);
    plot.classList.add("is-read");
    outputs.forEach((output, i) => { output.textContent = `${shortNumber(near[i][1])} at step ${near[i][0]}`; });
  });
  plot.addEventListener("pointerleave", () => {
    plot.classList.remove("is-read");
    outputs.forEach((output, i) => { output.innerHTML = atRest[i]; });
  });
}

function findIn(input, items, textOf, done) {
  const find = () => {
    const words = input.value.toLowerCase().split(/[\s,]+/).filter(Boolean);
    for (const item of items) {
      const text = textOf(item).toLowerCase();
      item.hidden = !words.every((word) => text.includes(word));
    }
    done?.();
  };
  input?.addEventListener("input", find);
  if (input?.value) find();
}

function setUpCurves() {
  document.querySelectorAll(".curve").forEach(setUpCurve);
  findIn(
    document.getElementById("others-find"),
    [...document.querySelectorAll("#others .curve")],
    (figure) => figure.dataset.metric,
  );
}

function colourTokens(name) {
  document.getElementById("sample-list").classList.toggle("is-by-token", name !== undefined);
  if (name === undefined) return;
  const sampleTokens = [...document.querySelectorAll(".tok")];
  // A log-prob is coloured by its probability: one very unlikely token would make all others look alike.
  const values = sampleTokens.map((token) => Number(token.dataset[name]));
  const low = values.reduce((a, b) => Math.min(a, b), Infinity);
  const high = values.reduce((a, b) => Math.max(a, b), -Infinity);
  sampleTokens.forEach((token, i) => {
    const share = high > low ? (values[i] - low) / (high - low) : 1;
    token.style.setProperty("--at", name === "l" ? Math.exp(values[i]) : share);
    token.title = `log-prob ${token.dataset.l}, version ${token.dataset.v}`;
  });
}

function colourBy(key) {
  const samples = [...document.querySelectorAll(".sample")];
  const numbers = samples.map((sample) => JSON.parse(sample.dataset.numbers)[key]);
  const known = numbers.filter((number) => number !== null);
  const low = Math.min(...known);
  const high = Math.max(...known);
  samples.forEach((sample, i) => {
    const at = high > low ? (numbers[i] - low) / (high - low) : 1;
    sample.classList.toggle("is-without", numbers[i] === null);
    sample.style.setProperty("--at", at);
  });
  colourTokens({ "log-prob": "l", version: "v" }[key]);
  document.getElementById("scale-low").textContent = `${key} ${shortNumber(low)}`;
  document.getElementById("scale-high").textContent = shortNumber(high);
  for (const chip of document.querySelectorAll("[data-colour]")) {
    chip.setAttribute("aria-pressed", String(chip.dataset.colour === key));
  }
}

function setUpSamples() {
  const samples = [...document.querySelectorAll(".sample")];
  const sampleCount = document.getElementById("samples-count");
  function countSamples() {
    if (!sampleCount) return;
    const shown = samples.filter((sample) => !sample.hidden).length;
    sampleCount.textContent = `${shown} of ${samples.length} shown`;
  }
  countSamples();
  findIn(document.getElementById("samples-find"), samples, (sample) => sample.textContent, countSamples);
  const chips = [...document.querySelectorAll("[data-colour]")];
  for (const chip of chips) chip.addEventListener("click", () => colourBy(chip.dataset.colour));
  const chosen = chips.find((chip) => chip.getAttribute("aria-pressed") === "true") ?? chips[0];
  if (chosen) colourBy(chosen.dataset.colour);
}

const setUps = { curves: setUpCurves, samples: setUpSamples };
// The sections as they were sent, before anything changes them.
const sentSections = new Map([...document.querySelectorAll("section")].map((one) => [one.id || "top", one.outerHTML]));
for (const setUp of Object.values(setUps)) setUp();
