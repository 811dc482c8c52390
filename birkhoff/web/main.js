// Starts the page: the store, the views, restoring state from a link, and the connection to the server.
import { keys } from "./api.js";
import { chatPage } from "./chat.js";
import { circuitPage } from "./circuit.js";
import { contrastPage } from "./contrast.js";
import { fill, h, tabs } from "./dom.js";
import { featurePage } from "./features.js";
import { heatmapPanel, pinLine } from "./inside.js";
import { lensPanel } from "./lens.js";
import { expertPanel, memoryPanel } from "./memory.js";
import { filmStrip, lineagePanel } from "./mixing.js";
import { fromLink } from "./recipe.js";
import { capturePage, requestPage } from "./requests.js";
import { refreshProps, runOf, showRun, startRun } from "./runs.js";
import { copyLink, share } from "./share.js";
import { steerPage } from "./steer.js";
import { initialState } from "./state.js";
import { makeStore } from "./store.js";
import { startTour } from "./tour.js";
import { loadSaes, loadVectors } from "./vectors.js";

const store = makeStore(initialState());

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  localStorage.setItem("birkhoff-theme", theme);
  store.set({ theme });
}
setTheme(
  localStorage.getItem("birkhoff-theme") ??
    (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light"),
);
document
  .getElementById("theme")
  .addEventListener("click", () => setTheme(store.state.theme === "dark" ? "light" : "dark"));
document.getElementById("recipe").addEventListener("click", () => copyLink(store.state));

let restored = null,
  linkError = null;
try {
  restored = fromLink(location.hash);
} catch (error) {
  linkError = error;
}
if (restored) store.set({ ...restored.state, suggestEdit: false });

const inside = h(
  "div",
  { class: "stack" },
  pinLine(store),
  h(
    "div",
    { class: "panels" },
    heatmapPanel(store),
    filmStrip(store),
    lineagePanel(store),
    expertPanel(store),
    lensPanel(store),
    memoryPanel(store),
  ),
);
const talk = [
  ["chat", "Chat", chatPage(store)],
  ["steer", "Steer", steerPage(store)],
];
const look = [
  ["inside", "Inside", inside],
  ["features", "Features", featurePage(store)],
  ["contrast", "Contrast", contrastPage(store)],
  ["circuit", "Circuit", circuitPage(store)],
  ["requests", "Requests", requestPage(store)],
  ["captures", "Captures", capturePage(store)],
];
for (const [place, name, pages, key] of [
  ["talk", "Talk", talk, "talkPage"],
  ["look", "Look", look, "lookPage"],
]) {
  const root = document.getElementById(place),
    bar = tabs(name, pages, store.state[key], (id) => store.set({ [key]: id }));
  store.on([key], (state) => bar.show(state[key]), false);
  fill(
    root,
    bar.list,
    pages.map(([, , node]) => node),
  );
}

store.on(["talkPage"], ({ talkPage }) => {
  showRun(store, talkPage);
  document.querySelector("main").dataset.talk = talkPage;
});
document.getElementById("tour").addEventListener("click", () => startTour(store));
document
  .getElementById("save-view")
  .addEventListener("click", () => share(store, { kind: "html", panel: null }));
document.addEventListener("share", (event) => share(store, event.detail));

const banner = document.getElementById("banner"),
  model = document.getElementById("model");
function showBanner(...children) {
  banner.hidden = !children.length;
  fill(banner, ...children);
}

function promptForKey() {
  const reason = keys.get() ? "That key was not accepted. " : "This server requires an API key. ";
  const submit = () => {
    keys.set(key.value, steering.value);
    connect();
  };
  const field = (label) =>
    h("input", {
      type: "password",
      "aria-label": label,
      autocomplete: "off",
      onkeydown: (event) => {
        if (event.key === "Enter" && !event.isComposing) submit();
      },
    });
  const key = field("key"),
    steering = field("steering key");
  showBanner(
    h("strong", {}, reason),
    h("label", {}, "key", key),
    h("label", {}, "steering key (optional)", steering),
    h("button", { class: "main", onclick: submit }, "Connect"),
  );
  key.focus();
}

/** Connects and keeps retrying. A missing server or key is shown in the banner until it is back. */
let trying = 0;
async function connect() {
  clearTimeout(trying);
  try {
    await refreshProps(store);
    const { props } = store.state;
    const width = props.hidden ? ` of ${props.hidden}` : "";
    const streams = props.num_streams ? `${props.num_streams} streams` : "one residual stream";
    model.textContent = `${props.model} · ${props.num_layers} layers · ${streams}${width}`;
    showBanner();
    await Promise.allSettled([loadVectors(store), loadSaes(store)]);
    if (linkError) {
      showBanner(linkError.message);
      linkError = null;
    }
    if (restored?.model && restored.model !== props.model)
      showBanner(`This link was created with ${restored.model}, but this server runs ${props.model}.`);
    if (restored?.ran) {
      const link = restored;
      restored = null;
      await replay(link);
    }
    restored = null;
    trying = setTimeout(watch, 3000);
  } catch (error) {
    store.set({ connected: false });
    if (error.status === 401 || error.status === 403) {
      promptForKey();
      return;
    }
    model.textContent = "No server";
    showBanner(
      h("strong", {}, "No response from the server. "),
      error.code === "loading" ? "The model is still loading." : error.message,
    );
    trying = setTimeout(connect, 1000);
  }
}
async function watch() {
  try {
    const response = await fetch("/health");
    if (!response.ok) throw new Error();
    trying = setTimeout(watch, 2000);
  } catch {
    connect();
  }
}
async function replay({ pair, pin, branch, panel }) {
  const messages = pair ? [{ role: "user", content: store.state.benchPrompt }] : store.state.conversation;
  if (!messages.length) return;
  await startRun(store, { messages, branch, steered: pair || store.state.steerChat, baseline: pair });
  if (pin) {
    runOf(store.state, pair ? "steer" : "chat").pin = pin;
    store.set({ pin: store.state.pin });
  }
  if (panel) setTimeout(() => showPanel(panel), 300); // when panels have their final height
}
function showPanel(name) {
  const panel = [...document.querySelectorAll("[data-panel]")].find((node) => node.dataset.panel === name);
  panel?.scrollIntoView({ block: "center" });
}
store.on(
  ["run"],
  ({ run }) => {
    if (run.error?.status === 401) promptForKey();
    else if (run.error?.code === "unreachable" || run.error?.code === "cut_off") connect();
  },
  false,
);
connect();
