// Parts that are wider than their place say so, as a phone shows no scroll bars.
const wideParts = new ResizeObserver((entries) => {
  for (const { target } of entries) target.classList.toggle("is-wide", target.scrollWidth > target.clientWidth + 1);
});
for (const part of document.querySelectorAll(".scroll")) wideParts.observe(part);
