// Python code that computes what a panel shows and draws it. `values` holds the numbers of the picture.
import { python as pythonEdits } from "./edits.js";
import { pyText as text, tokenIds } from "./pinned.js";
import { orderOf } from "./store.js";

/** The lines that name the tokens of the text, up to a position, and that choose the frame of the pinned token. */
const idsLine = (state, upTo) => `token_ids = ${JSON.stringify(tokenIds(state, upTo))}`;
const pinnedAt = (state) => state.pin?.position ?? -1;
const frameLine = (state) => `frame = next(frame for frame in frames if frame["position"] == ${pinnedAt(state)})`;
const model = (state) => text(state.props?.model ?? "nano");

/** A script that loads the model and runs `lines`; `imports` stand above. */
export function script(state, lines, imports = []) {
  const own = imports.length ? [...imports, ""] : [""];
  return ["import birkhoff", ...own, `engine = birkhoff.load(${model(state)})`, ...lines, ""].join("\n");
}

/** The edits of a steered run; those of its unsteered twin are none. */
function steering(state) {
  const edits = state.pin?.twin ? [] : (state.run.edits ?? []);
  return edits.length
    ? {
        imports: ["from birkhoff import Add, SaeSet"],
        lines: [...attachments(state, edits), `steer = ${pythonEdits(edits)}`],
        argument: ", steer=steer",
      }
    : { imports: [], lines: [], argument: "" };
}

function attachments(state, edits) {
  const names = new Set(edits.filter((e) => e.kind === "feature").map((e) => e.module));
  return [...names].map((name) => attach(state, name));
}

/** The line that attaches a dictionary: the model's own by its name. */
export const attach = (state, name) =>
  `engine.attach(${text(name)}, ${name === state.props?.model ? text(name) : '"PATH"'})`;

/** A script that records signals of the whole text; `lines` use `frames`, one per token. */
function ofSignals(state, signals, lines, imports = []) {
  const { argument, ...steer } = steering(state);
  return script(
    state,
    [
      ...steer.lines,
      idsLine(state),
      `frames = engine.generate(token_ids, max_tokens=1, signals=${JSON.stringify(signals)}${argument}).signals`,
      ...lines,
    ],
    [...imports, ...steer.imports],
  );
}

const NUMBERS = ["import torch"];
const drawMap = (name) => [
  "import matplotlib.pyplot as plt",
  "",
  'plt.imshow(values, aspect="auto")',
  `plt.title(${text(name)})`,
  'plt.xlabel("token")',
  'plt.ylabel("sublayer")',
  "plt.colorbar()",
  "plt.show()",
];

/** The heat map of `state.scalar`: `values[row][token]`. */
export function heatmapPython(state, title) {
  const of = state.stream === "all" ? null : state.stream,
    all = (reduced) => (of === null ? reduced : `rows[..., ${of}]`);
  const table = (signal) => `rows = torch.tensor([frame[${text(signal)}] for frame in frames])`;
  const sums = {
    stream_norm: ["stream_norm", `values = ${all("rows.square().sum(-1).sqrt()")}.T.tolist()`],
    read: ["pre_mix", `values = ${all("rows.sum(-1)")}.T.tolist()`],
    write: ["post_mix", `values = ${all("rows.sum(-1)")}.T.tolist()`],
    keep: ["res_mix", `values = rows.diagonal(dim1=-2, dim2=-1)${of === null ? ".mean(-1)" : `[..., ${of}]`}.T.tolist()`],
    cosine: [`cosine:${state.vector}`, `values = ${all("rows.mean(-1)")}.T.tolist()`],
  };
  const longer = {
    stream_share: [
      "stream_norm",
      "share = rows.square() / rows.square().sum(-1, keepdim=True)",
      `values = ${of === null ? "share.amax(-1)" : `share[..., ${of}]`}.T.tolist()`,
    ],
    stochastic: [
      "res_mix",
      "error = torch.maximum((rows.sum(-1) - 1).abs().amax(-1), (rows.sum(-2) - 1).abs().amax(-1))",
      "values = error.T.tolist()",
    ],
    experts: [
      "experts",
      "share = rows[..., 1] / rows[..., 1].sum(-1, keepdim=True)",
      "values = (share * -share.log()).sum(-1).T.tolist()",
    ],
  };
  const [signal, ...lines] = sums[state.scalar] ?? longer[state.scalar] ?? [];
  if (signal) return ofSignals(state, [signal], [table(signal), ...lines, ...drawMap(title)], NUMBERS);
  if (state.scalar === "lens") {
    const of_ = typeof state.lensView === "number" || /^\d+$/.test(state.lensView) ? state.lensView : text(state.lensView);
    return script(state, [
      idsLine(state),
      "lens = engine.lens(token_ids)",
      `values = [lens.surprise(depth, ${of_}).tolist() for depth in range(lens.depths)]`,
      ...drawMap(title),
    ]);
  }
  const column = state.scalar === "blocks" ? 1 : 2;
  return script(
    state,
    [idsLine(state), `values = attention_masses(engine, token_ids)[..., ${column}].tolist()`, ...drawMap(title)],
    ["from birkhoff.analysis.attention import attention_masses"],
  );
}

/** The mixers, read and write weights of the pinned token. */
export function filmPython(state) {
  return ofSignals(state, ["res_mix", "pre_mix", "post_mix"], [
    frameLine(state),
    'values = frame["res_mix"]  # [sublayer][from][to]',
    'reads, writes = frame["pre_mix"], frame["post_mix"]  # [sublayer][stream]',
    "import matplotlib.pyplot as plt",
    "",
    "figure, tiles = plt.subplots(3, len(values), figsize=(len(values), 3))",
    "for column, mixer in enumerate(values):",
    "    tiles[0, column].imshow(mixer, vmin=0, vmax=1)",
    "    tiles[1, column].bar(range(len(mixer)), reads[column])",
    "    tiles[2, column].bar(range(len(mixer)), writes[column])",
    "    tiles[0, column].set_title(f\"{'ffn' if column % 2 else 'attn'} {column // 2}\")",
    "plt.show()",
  ]);
}

export function lineagePython(state, from, to) {
  return ofSignals(
    state,
    ["res_mix"],
    [
      frameLine(state),
      'mixers = torch.tensor(frame["res_mix"])',
      "values = torch.eye(mixers.shape[-1])  # [from][to]",
      `for mixer in mixers[${from}:${to}]:`,
      "    values = values @ mixer",
      "print(values)",
    ],
    NUMBERS,
  );
}

export function expertsPython(state) {
  return ofSignals(state, ["experts"], [
    frameLine(state),
    'values = frame["experts"]  # [layer][choice]: expert, weight',
    "for layer, chosen in enumerate(values):",
    '    print(layer, " ".join(f"{int(expert)}: {weight:.3f}" for expert, weight in chosen))',
  ]);
}

export function lensPython(state) {
  return script(state, [
    idsLine(state, pinnedAt(state)),
    "lens = engine.lens(token_ids)",
    "values = [[lens.top(depth, view, -1, 1)[0] for view in lens.views] for depth in range(lens.depths)]",
    'print("depth", *lens.views, sep="\\t")',
    "for depth, row in enumerate(values):",
    '    print(depth, *(repr(engine.tokenizer.decode([token])) for token, _ in row), sep="\\t")',
  ]);
}

export function memoryPython(state) {
  return script(state, [
    idsLine(state, pinnedAt(state)),
    "values = engine.attention(token_ids)  # of the last token, by layer",
    "for layer, memory in enumerate(values):",
    '    print(f"layer {layer}: sink {memory.sink:.2f}, window {memory.window.tolist()}")',
    "    for block in memory.chosen.nonzero().flatten().tolist():",
    '        print(f"    tokens {block * memory.ratio}..{(block + 1) * memory.ratio - 1}: {memory.entries[block]:.3f}")',
  ]);
}

export function featuresPython(state) {
  const name = text(state.sae);
  return script(state, [
    attach(state, state.sae),
    idsLine(state),
    `values = engine.features(token_ids, ${name}, k=32, order=${text(orderOf(state))})`,
    "for token, active in zip(token_ids, values):",
    "    print(repr(engine.tokenizer.decode([token])), [(f.feature, f.label, f.activation) for f in active[:5]])",
  ]);
}

export function dashboardPython(state) {
  return script(state, [
    attach(state, state.sae),
    `entry = engine.feature(${text(state.sae)}, ${state.featureChosen ?? 0})`,
    "print(entry.label, entry.made, entry.score, entry.density)",
    "for context in entry.contexts + entry.examples:",
    '    print(context["value"], context["text"])',
  ]);
}

export function contrastPython(state, { positive, negative, hook }, best, name) {
  return script(
    state,
    [
      `positive = ${JSON.stringify(positive)}`,
      `negative = ${JSON.stringify(negative)}`,
      `rows = contrast_rows(engine, positive, negative, ${text(hook)})`,
      "values = rows.separation()  # one entry per layer and stream",
      "for entry in values:",
      "    print(entry.layer, entry.stream, entry.auc)",
      `vector = contrast(engine, positive, negative, hook=${text(hook)}, layers=[${best?.layer ?? 4}])`,
      `engine.modules[${text(name)}] = vector`,
    ],
    ["from birkhoff.analysis.contrast import contrast, contrast_rows"],
  );
}

/** The answer of a chat, or of the bench with and without its edits. */
export function chatPython(state, messages, edits) {
  const { settings } = state;
  return script(
    state,
    [
      `messages = ${JSON.stringify(messages, null, 4)}`,
      ...attachments(state, edits),
      ...(edits.length ? [`steer = ${pythonEdits(edits)}`] : []),
      "out = engine.chat(",
      "    messages,",
      `    temperature=${settings.temperature},`,
      `    seed=${settings.seed},`,
      `    max_tokens=${settings.maxTokens},`,
      "    logprobs=8,",
      ...(edits.length ? ["    steer=steer,", "    baseline=True,"] : []),
      ")",
      "print(out.text)",
      ...(edits.length ? ["print(out.baseline.text)"] : []),
    ],
    edits.length ? ["from birkhoff import Add, SaeSet"] : [],
  );
}

/** The answer that goes on from the kept tokens of another one. */
export function branchPython(state) {
  const { settings, run } = state,
    kept = run.prompt.length + run.kept;
  return script(state, [
    `token_ids = ${JSON.stringify(tokenIds(state, kept - 1))}  # the prompt and the kept beginning of the answer`,
    `out = engine.generate(token_ids, temperature=${settings.temperature}, seed=${settings.seed}, ` +
      `max_tokens=${settings.maxTokens})`,
    `print(engine.tokenizer.decode(token_ids[${run.prompt.length}:]) + out.text)`,
  ]);
}

/** One edit at nine strengths: `values` are (strength, surprisal under the unsteered model, text). */
export function sweepPython(state, messages, edits, strengths) {
  const [first, ...rest] = edits;
  if (!first) return chatPython(state, messages, edits);
  const { seed, temperature } = state.settings,
    one = (strength) => pythonEdits([{ ...first, strength }, ...rest]);
  return script(
    state,
    [
      ...attachments(state, edits),
      `messages = ${JSON.stringify(messages)}`,
      "values = []",
      `for strength, steer in [`,
      ...strengths.map((s) => `    (${s}, ${s ? one(s) : "None"}),`),
      "]:",
      `    out = engine.chat(messages, temperature=${temperature}, seed=${seed}, max_tokens=64, steer=steer)`,
      "    ids = out.prompt_token_ids + out.token_ids",
      "    surprise = engine.lens(ids).surprise(-1)[len(out.prompt_token_ids) - 1 : -1]",
      "    values.append((strength, float(surprise.nanmean()), out.text))",
      "    print(values[-1])",
    ],
    ["from birkhoff import Add, SaeSet"],
  );
}
