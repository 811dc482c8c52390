// State as a link: everything needed to reproduce a result, in the URL fragment, which servers never see.
import { newEdit } from "./edits.js";

const KEPT = [
  "conversation",
  "benchPrompt",
  "contrast",
  "lineage",
  "tint",
  "edits",
  "settings",
  "scalar",
  "stream",
  "lensView",
  "vector",
  "talkPage",
  "lookPage",
  "featureChosen",
  "sae",
  "steerChat",
];

export function toLink(state, panel = null) {
  const kept = Object.fromEntries(KEPT.map((name) => [name, state[name]]));
  const { run, pin } = state.run.status === "idle" ? state.aside : state; // the one that can be replayed
  kept.pin = pin;
  if (panel) kept.panel = panel;
  kept.pair = Boolean(run.pair);
  kept.ran = run.status !== "idle";
  if (run.kept) kept.branch = run.tokens.slice(0, run.kept).map((t) => [t.id, t.text]);
  kept.model = state.props?.model ?? null;
  kept.conversation = state.conversation.filter(
    (m, i, all) => !(m.role === "assistant" && i === all.length - 1),
  );
  const bytes = new TextEncoder().encode(JSON.stringify(kept));
  return `${location.origin}${location.pathname}#r=${btoa(String.fromCharCode(...bytes))
    .replace(/\+/g, "-")
    .replace(/\//g, "_")
    .replace(/=+$/, "")}`;
}

/** The state in a link, or null if there is none; throws if it is malformed. */
export function fromLink(hash) {
  const coded = hash.match(/^#r=([A-Za-z0-9_-]+)$/)?.[1];
  if (!coded) return null;
  try {
    const bytes = Uint8Array.from(atob(coded.replace(/-/g, "+").replace(/_/g, "/")), (c) =>
      c.charCodeAt(0),
    );
    const kept = JSON.parse(new TextDecoder().decode(bytes)),
      state = {};
    for (const name of KEPT) if (kept[name] !== undefined) state[name] = kept[name];
    if (!Array.isArray(state.edits ?? []) || !Array.isArray(state.conversation ?? [])) throw new Error();
    state.edits = (state.edits ?? []).map(({ id, ...edit }) => newEdit(edit)); // numbers of this page
    return {
      state,
      pin: kept.pin ?? null,
      panel: typeof kept.panel === "string" ? kept.panel : null,
      pair: Boolean(kept.pair),
      ran: Boolean(kept.ran),
      branch: kept.branch ? { tokens: kept.branch.map(([id, text]) => ({ id, text })) } : null,
      model: kept.model,
    };
  } catch {
    throw new Error("The state in this link cannot be read. The link may be incomplete.");
  }
}
