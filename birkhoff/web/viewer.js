// A saved view: the panels of the page on data that stands in the file, without a server.
import { capturedPanel } from "./captured.js";
import { chatPage } from "./chat.js";
import { contrastPage } from "./contrast.js";
import { fill, h } from "./dom.js";
import { featurePage } from "./features.js";
import { heatmapPanel, pinLine } from "./inside.js";
import { lensPanel } from "./lens.js";
import { expertPanel, memoryPanel } from "./memory.js";
import { filmStrip, lineagePanel } from "./mixing.js";
import { initialState } from "./state.js";
import { thaw } from "./share.js";
import { steerPage } from "./steer.js";
import { makeStore } from "./store.js";

const PAGES = [
  chatPage,
  capturedPanel,
  heatmapPanel,
  filmStrip,
  lineagePanel,
  expertPanel,
  lensPanel,
  memoryPanel,
  steerPage,
  featurePage,
  contrastPage,
];

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
}

/** The wanted panels of one text, in the order they were asked for. */
function panelsOf(store, names) {
  const built = h("div", {}, PAGES.map((page) => page(store))),
    sections = new Map([...built.querySelectorAll("[data-panel]")].map((node) => [node.dataset.panel, node]));
  return names.map((name) => sections.get(name)).filter(Boolean);
}

export function showSaved(data) {
  document.body.classList.add("frozen");
  const main = document.querySelector("main"),
    title = document.getElementById("title");
  const show = (text) => {
    const store = makeStore({ ...initialState(), ...thaw(text.state), frozen: true, suggestEdit: false }),
      panels = panelsOf(store, data.panels);
    setTheme(store.state.theme);
    for (const node of panels) node.classList.toggle("wide", node.matches(".wide") || data.panels.length < 3);
    const single = data.panels.length === 1;
    fill(main, single ? null : pinLine(store), h("div", { class: "panels" }, panels));
    document.getElementById("theme").onclick = () => {
      setTheme(store.state.theme === "dark" ? "light" : "dark");
      store.set({ theme: document.documentElement.dataset.theme });
    };
    document.body.dataset.ready = "true";
  };
  const choose = h(
    "select",
    { "aria-label": "text", onchange: () => show(data.texts[choose.selectedIndex]) },
    data.texts.map((text, i) => h("option", { value: i }, text.title ?? `text ${i + 1}`)),
  );
  const facts = Object.entries(data.facts ?? {}).map(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]);
  fill(
    title,
    data.title ?? "A saved view of Birkhoff",
    facts.length ? h("dl", { class: "kinds note" }, facts) : null,
    data.texts.length > 1 ? h("label", {}, "text", choose) : null,
  );
  show(data.texts[0]);
}
