// Edits of the Steer page: as `interventions` of a request, as steering grammar, and as Python.
import { KINDS, gateOf } from "./kinds.js";

let number = 0;
export function newEdit(changes) {
  return {
    id: ++number,
    kind: "vector",
    name: "",
    strength: 1,
    hook: "",
    layers: "",
    streams: "all",
    phase: "both",
    path: "both",
    on: true,
    ...changes,
  };
}

/** An edit that adds a registered vector at its recommended strength. */
export function vectorEdit(state, name) {
  const known = state.vectors.find((v) => v.name === name),
    strength = known?.strength ?? 2;
  return newEdit({ name, strength, most: Math.max(4, Math.abs(strength) * 4), streams: "own" });
}

/** An edit of a mixer, the router or attention. */
export const kindEdit = (kind) =>
  newEdit({
    kind,
    name: kind,
    layers: "*",
    ...Object.fromEntries(KINDS[kind].fields.map(([name, , value]) => [name, value])),
  });

/** The vector the bench starts with: a shipped one whose effect is plain to see, else the first. */
export function firstEdit(state) {
  const names = state.vectors.map((v) => v.name),
    name = ["spooky", "sea", ...names].find((n) => names.includes(n));
  return name ? [{ ...vectorEdit(state, name), suggested: true }] : [];
}

/** Opens the bench with this vector as its only edit. */
export function steerWith(store, name) {
  store.set({ edits: [vectorEdit(store.state, name)], talkPage: "steer" });
}

/** Opens the bench with one more edit; a suggested one that was not touched gives way to it. */
export function addToBench(store, edit) {
  store.set({ edits: [...store.state.edits.filter((e) => !e.suggested), edit], talkPage: "steer" });
  scrollTo({ top: 0 });
}

/** Parses a layer selector such as "4", "4,6", "2..5", "-1" or "*". */
export function layersOf(text) {
  const selector = text.trim();
  if (selector === "*" || selector === "") return "all";
  const layers = [],
    ranges = [];
  for (const part of selector.split(",").map((p) => p.trim())) {
    const range = part.match(/^(\d+)\.\.(\d+)$/);
    if (range) ranges.push([Number(range[1]), Number(range[2])]);
    else if (/^-?\d+$/.test(part)) layers.push(Number(part));
    else throw new Error(`“${part}” is no layer. Write 4, or 4,6, or 2..5, or -1, or *.`);
  }
  return ranges.length ? { ...(layers.length ? { layers } : {}), ranges } : layers;
}

/** `one`: the model has one residual stream. */
export function interventions(edits, one = false) {
  return edits
    .filter((edit) => edit.on && edit.name)
    .map((edit) => {
      if (KINDS[edit.kind]) {
        const at = { ...(edit.hook ? { hook: edit.hook } : {}), layers: layersOf(edit.layers) },
          { op, ...rest } = KINDS[edit.kind].wire(edit);
        return { op, at, ...rest, ...(edit.phase !== "both" ? { phase: edit.phase } : {}) };
      }
      if (edit.kind === "feature")
        return {
          op: "sae",
          module: edit.module,
          mode: "delta",
          set: { [edit.feature]: edit.strength },
          ...(edit.phase !== "both" ? { phase: edit.phase } : {}),
        };
      const out = { op: "add", vector: `@${edit.name}`, scale: edit.strength, path: edit.path };
      if (edit.hook) out.at = { hook: edit.hook, layers: layersOf(edit.layers) };
      if (edit.streams !== "own" && !one && (!edit.hook || edit.hook.startsWith("mhc_streams")))
        out.streams = edit.streams === "all" ? "all" : [...edit.streams];
      if (edit.phase !== "both") out.phase = edit.phase;
      if (edit.gate) out.when = gateOf(edit);
      return out;
    });
}

export function grammar(edits) {
  return edits
    .filter((e) => e.on && e.name && e.kind === "vector" && !e.gate)
    .map((e) => {
      const streams = Array.isArray(e.streams)
        ? ` stream=${e.streams.join(",")}`
        : e.streams === "own"
          ? ""
          : " stream=all";
      const site = e.hook ? ` @ ${e.hook}[${e.layers || "*"}]` : "";
      const phase = e.phase === "both" ? "" : ` phase=${e.phase}`;
      const path = e.path === "both" ? "" : ` path=${e.path}`;
      return `${e.strength >= 0 ? "+" : ""}${e.strength} ${e.name}${site}${streams}${phase}${path}`;
    })
    .join("; ");
}

export function python(edits) {
  const active = edits.filter((e) => e.on && e.name);
  return `[${active.map(pythonEdit).join(", ")}]`;
}

function pythonEdit(e) {
  if (KINDS[e.kind])
    return `*engine.edits_from_json({"interventions": ${JSON.stringify(interventions([e]))}})`;
  const phase = e.phase === "both" ? "" : `, phase="${e.phase}"`;
  if (e.kind === "feature")
    return `SaeSet(${JSON.stringify(e.module)}, {${JSON.stringify(e.feature)}: ${e.strength}}${phase})`;
  const layers = e.hook ? JSON.stringify(layersOf(e.layers)) : "";
  const site = e.hook ? `, hook=${JSON.stringify(e.hook)}, layers=${layers}` : "";
  const streams = e.streams === "own" ? "" : `, streams=${JSON.stringify(e.streams)}`;
  const gate = e.gate ? `, when=${JSON.stringify(gateOf(e))}` : "";
  return `Add(${JSON.stringify(e.name)}, scale=${e.strength}${site}${streams}${phase}, path="${e.path}"${gate})`;
}

/** The edits that are switched on; those with a strength first, which a sweep varies. */
export const activeEdits = (state) =>
  state.edits.filter((e) => e.on && e.name).sort((a, b) => Boolean(KINDS[a.kind]) - Boolean(KINDS[b.kind]));
