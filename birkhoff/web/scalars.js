// The scalars the heat map can show. Each maps the page's state to rows and values.
import { stochasticError } from "./mixing.js";
import { framesOf, sublayerName } from "./pinned.js";
import { tokensOf } from "./store.js";

const sum = (list) => list.reduce((a, b) => a + b, 0);
const entropy = (weights) => {
  const total = sum(weights) || 1;
  return -sum(weights.map((w) => (w > 0 ? (w / total) * Math.log(w / total) : 0)));
};

function sublayers(frame, last) {
  return [
    ...(frame.res_mix ?? frame.stream_norm?.slice(0, -1) ?? []).map((_, s) => sublayerName(s)),
    ...(last ? ["final"] : []),
  ];
}

/** Weights with which a sublayer reads or writes streams. */
const weights = (title, signal) => ({
  title,
  signals: [signal],
  perStream: true,
  unit: "weight",
  low: 0,
  rows: (frame) => frame[signal].map((_, s) => sublayerName(s)),
  column: (frame, stream) => frame[signal]?.map((w) => (stream === "all" ? sum(w) : w[stream])),
});

/** By name: required signals or request, row labels, and the column of values of a frame (top row first). */
export const SCALARS = {
  stream_norm: {
    title: "stream norm",
    signals: ["stream_norm"],
    perStream: true,
    unit: "norm",
    rows: (frame) => sublayers(frame, true),
    column: (frame, stream) =>
      frame.stream_norm?.map((norms) =>
        stream === "all" ? Math.sqrt(sum(norms.map((x) => x * x))) : norms[stream],
      ),
  },
  stream_share: {
    title: "stream share of the squared norm",
    signals: ["stream_norm"],
    perStream: true,
    unit: "share",
    low: 0,
    high: 1,
    rows: (frame) => sublayers(frame, true),
    column: (frame, stream) =>
      frame.stream_norm?.map((norms) => {
        const total = sum(norms.map((x) => x * x)) || 1;
        return stream === "all"
          ? Math.max(...norms.map((x) => (x * x) / total))
          : norms[stream] ** 2 / total;
      }),
  },
  read: weights("read weight", "pre_mix"),
  write: weights("write weight", "post_mix"),
  keep: {
    title: "self-retention of streams",
    signals: ["res_mix"],
    perStream: true,
    unit: "share",
    low: 0,
    high: 1,
    rows: (frame) => sublayers(frame, false),
    column: (frame, stream) =>
      frame.res_mix?.map((matrix) =>
        stream === "all" ? sum(matrix.map((line, i) => line[i])) / matrix.length : matrix[stream][stream],
      ),
  },
  stochastic: {
    title: "deviation from doubly stochastic",
    signals: ["res_mix"],
    unit: "error",
    low: 0,
    rows: (frame) => sublayers(frame, false),
    column: (frame) => frame.res_mix?.map(stochasticError),
  },
  experts: {
    title: "expert entropy",
    signals: ["experts"],
    unit: "nats",
    low: 0,
    rows: (frame) => frame.experts.map((_, layer) => `layer ${layer}`),
    column: (frame) => frame.experts?.map((chosen) => entropy(chosen.map(([, weight]) => weight))),
  },
  lens: { title: "surprisal under the logit lens", ask: "lens", perView: true, unit: "nats", low: 0 },
  blocks: { title: "attention on compressed blocks", ask: "attention", unit: "share", low: 0, high: 1 },
  sink: { title: "attention on the sink", ask: "attention", unit: "share", low: 0, high: 1 },
  cosine: {
    title: "cosine to a vector",
    signals: [],
    perStream: true,
    perVector: true,
    unit: "cosine",
    scale: "signed",
    low: -1,
    high: 1,
  },
};

/** Heat map data of the selected scalar; columns are the tokens of the pinned text. Null without data. */
export function picture(state) {
  const scalar = SCALARS[state.scalar],
    frames = framesOf(state),
    text = tokensOf(state.run, state.pin?.twin),
    stream = state.stream;
  if (!text.length) return null;
  if (scalar.ask) {
    const asked = state.asked?.[`${scalar.ask}:${state.pin?.twin ? "twin" : "run"}`];
    if (!asked?.rows) return null;
    const table = asked.tables[state.scalar === "lens" ? String(state.lensView) : state.scalar];
    return table
      ? {
          columns: text.length,
          rows: asked.rows,
          value: (x, y) => table[y]?.[x] ?? undefined,
          ...range(scalar),
        }
      : null;
  }
  const key = scalar.perVector ? `cosine:${state.vector}` : null,
    first = frames.values().next().value;
  if (!first) return null;
  const column = scalar.perVector
    ? (frame) => frame[key]?.map((c) => (stream === "all" ? sum(c) / c.length : c[stream]))
    : scalar.column;
  const columns = new Map();
  for (const [position, frame] of frames) {
    const numbers = column(frame, stream);
    if (numbers) columns.set(position, numbers);
  }
  if (!columns.size) return null;
  const rows = scalar.perVector ? sublayers({ stream_norm: first[key] }, true) : scalar.rows(first);
  return { columns: text.length, rows, value: (x, y) => columns.get(x)?.[y], ...range(scalar) };
}

const range = (scalar) => ({
  scale: scalar.scale ?? "amount",
  low: scalar.low,
  high: scalar.high,
  unit: scalar.unit,
});
