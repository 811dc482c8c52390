// The bench's list of edits: plain data, as interventions on the wire, as one line of the steering grammar, as Python.

let number = 0;
export function newEdit(changes) {
  return { id: ++number, kind: "vector", name: "", strength: 1, hook: "", layers: "", streams: "all", phase: "both", path: "both", on: true, ...changes };
}

/** "4", "4,6", "2..5", "-1", "*" as a layer selector. */
export function layersOf(text) {
  const said = text.trim();
  if (said === "*" || said === "") return "all";
  const layers = [], ranges = [];
  for (const part of said.split(",").map((p) => p.trim())) {
    const range = part.match(/^(\d+)\.\.(\d+)$/);
    if (range) ranges.push([Number(range[1]), Number(range[2])]);
    else if (/^-?\d+$/.test(part)) layers.push(Number(part));
    else throw new Error(`“${part}” is no layer. Write 4, or 4,6, or 2..5, or -1, or *.`);
  }
  return ranges.length ? { ...(layers.length ? { layers } : {}), ranges } : layers;
}

export function interventions(edits) {
  return edits.filter((edit) => edit.on && edit.name).map((edit) => {
    if (edit.kind === "feature") return { op: "sae", module: edit.module, mode: "delta", set: { [edit.feature]: edit.strength }, ...(edit.phase !== "both" ? { phase: edit.phase } : {}) };
    const out = { op: "add", vector: `@${edit.name}`, scale: edit.strength, path: edit.path };
    if (edit.hook) out.at = { hook: edit.hook, layers: layersOf(edit.layers) };
    if (edit.streams !== "own") out.streams = edit.streams === "all" ? "all" : [...edit.streams];
    if (edit.phase !== "both") out.phase = edit.phase;
    return out;
  });
}

export function grammar(edits) {
  return edits.filter((e) => e.on && e.name && e.kind === "vector").map((e) => {
    const streams = Array.isArray(e.streams) ? ` stream=${e.streams.join(",")}` : e.streams === "own" ? "" : " stream=all";
    return `${e.strength >= 0 ? "+" : ""}${e.strength} ${e.name}${e.hook ? ` @ ${e.hook}[${e.layers || "*"}]` : ""}${streams}${e.phase === "both" ? "" : ` phase=${e.phase}`}${e.path === "both" ? "" : ` path=${e.path}`}`;
  }).join("; ");
}

export function python(edits) {
  return `[${edits.filter((e) => e.on && e.name).map((e) => e.kind === "feature"
    ? `SaeSet(${JSON.stringify(e.module)}, {${JSON.stringify(e.feature)}: ${e.strength}}${e.phase === "both" ? "" : `, phase="${e.phase}"`})`
    : `Add(${JSON.stringify(e.name)}, scale=${e.strength}${e.hook ? `, hook=${JSON.stringify(e.hook)}, layers=${JSON.stringify(layersOf(e.layers))}` : ""}${e.streams === "own" ? "" : `, streams=${JSON.stringify(e.streams)}`}${e.phase === "both" ? "" : `, phase="${e.phase}"`}, path="${e.path}")`).join(", ")}]`;
}
