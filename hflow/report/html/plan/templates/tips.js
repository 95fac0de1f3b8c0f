// Short explanations beside what the reader points at or has in focus.
const tip = document.getElementById("tip");

function placeTip(owner) {
  tip.textContent = owner.dataset.tip;
  tip.hidden = false;
  const at = owner.getBoundingClientRect();
  const size = tip.getBoundingClientRect();
  const wanted = at.left + at.width / 2 - size.width / 2;
  const left = Math.min(Math.max(8, wanted), window.innerWidth - size.width - 8);
  const above = at.top - size.height - 8;
  tip.style.left = `${left}px`;
  tip.style.top = `${above > 8 ? above : at.bottom + 8}px`;
}

function offerTip(event) {
  const owner = event.target.closest?.("[data-tip]");
  if (owner) placeTip(owner);
  else tip.hidden = true;
}
document.addEventListener("pointerover", offerTip);
document.addEventListener("focusin", offerTip);
document.addEventListener("focusout", () => { tip.hidden = true; });
document.addEventListener("scroll", () => { tip.hidden = true; }, { passive: true });
document.addEventListener("keydown", (event) => { if (event.key === "Escape") tip.hidden = true; });
