// The theme: the system's until the reader chooses the other one.
const theme = document.getElementById("theme");
const themeWord = document.getElementById("theme-word");
const systemDark = window.matchMedia("(prefers-color-scheme: dark)");

function isDark() {
  const chosen = document.documentElement.dataset.theme;
  return chosen === undefined ? systemDark.matches : chosen === "dark";
}

function nameTheme() {
  themeWord.textContent = isDark() ? "Light" : "Dark";
  theme.setAttribute("aria-label", `Use the ${isDark() ? "light" : "dark"} theme`);
}
theme.addEventListener("click", () => {
  document.documentElement.dataset.theme = isDark() ? "light" : "dark";
  nameTheme();
});
systemDark.addEventListener("change", nameTheme);
nameTheme();
