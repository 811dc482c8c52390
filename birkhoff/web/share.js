// Links and files of a view: the page's state in a URL, or in an HTML file that needs no server.
import { copy, toast } from "./dom.js";
import { download } from "./picture.js";
import { toLink } from "./recipe.js";

export function copyLink(state, panel = null) {
  const link = toLink(state, panel);
  history.replaceState(null, "", link);
  copy(link, "Link copied. It contains the prompt, the seed and all edits.");
}

/** Answers "share" events: `{kind, panel}`, or no panel for the whole view. */
export async function share(store, { kind, panel }) {
  const name = panel?.dataset.panel;
  if (kind === "link") {
    copyLink(store.state, name);
    return;
  }
  try {
    const html = await standaloneHtml(store.state, name ? withText(name) : shownPanels());
    download(`birkhoff-${name ?? "view"}.html`, new Blob([html], { type: "text/html" }));
    toast("Saved. The file opens in any browser, without a server.");
  } catch (error) {
    toast(error.message);
  }
}

/** Pictures of a token come with the text, so that the reader sees which token it is. */
const OF_A_TOKEN = ["heatmap", "film", "lineage", "experts", "lens", "memory"];
const withText = (name) => (OF_A_TOKEN.includes(name) ? ["chat", name] : [name]);

function shownPanels() {
  const open = document.querySelectorAll("[role=tabpanel]:not([hidden]) [data-panel]");
  return [...open].map((node) => node.dataset.panel).filter((name) => name !== "requests" && name !== "captures");
}

async function standaloneHtml(state, panels) {
  const response = await fetch("/assets/standalone.html");
  if (!response.ok) throw new Error(`The server returned status ${response.status} for the empty file.`);
  return fillTemplate(await response.text(), { panels, texts: [{ title: null, state: freeze(state) }] });
}

const MARK = ["null", "/* data */"].join(" "); // in pieces: this module is part of the template too

/** The data stands in a script element, where "<" could end it. */
function fillTemplate(template, data) {
  const json = JSON.stringify(data).replace(/</g, "\\u003c");
  return template.replace(MARK, () => json);
}

const FROZEN = [
  "props",
  "theme",
  "conversation",
  "benchPrompt",
  "edits",
  "vectors",
  "saes",
  "sae",
  "vector",
  "settings",
  "pin",
  "scalar",
  "stream",
  "lensView",
  "asked",
  "answers",
  "contrast",
  "lineage",
  "tint",
  "sweep",
  "featureChosen",
  "featureOrder",
  "dashboard",
];

/** Numbers with five digits are enough for pictures, and keep files small. */
const rounded = (_, value) =>
  typeof value === "number" && !Number.isInteger(value) ? Number(value.toPrecision(5)) : value;

/** The state as plain data, without keys and without what only a live page needs. */
function freeze(state) {
  const { run } = state,
    kept = Object.fromEntries(FROZEN.map((name) => [name, state[name]])),
    error = run.error ? { message: run.error.message } : null;
  if (run.pair) kept.conversation = run.messages ?? []; // the text beside pictures of a token
  kept.run = { ...run, error, frames: [...run.frames], twinFrames: [...run.twinFrames] };
  return JSON.parse(JSON.stringify(kept, rounded));
}

/** The state of a file, as views expect it. */
export function thaw({ run, ...kept }) {
  return { ...kept, run: { ...run, frames: new Map(run.frames), twinFrames: new Map(run.twinFrames) } };
}
