// The pinned token, which all panels show.
import { tokensOf } from "./store.js";

export function framesOf(state) {
  return state.pin?.twin ? state.run.twinFrames : state.run.frames;
}

export function pinnedFrame(state) {
  return state.pin ? (framesOf(state).get(state.pin.position) ?? null) : null;
}

export function pinnedToken(state) {
  return state.pin ? (tokensOf(state.run, state.pin.twin)[state.pin.position] ?? null) : null;
}

/** Token ids up to and including position `upTo`, or of the whole text. */
export function tokenIds(state, upTo = Infinity) {
  return tokensOf(state.run, state.pin?.twin)
    .slice(0, upTo + 1)
    .map((token) => token.id);
}

export const sublayerName = (s) => `${s % 2 ? "ffn" : "attn"} ${Math.floor(s / 2)}`;

export const pyText = (value) => JSON.stringify(value).replace(/\u2028|\u2029/g, " ");

/** A Python script that loads nano and runs `lines`. */
export const pythonScript = (...lines) =>
  ["import birkhoff", "", 'engine = birkhoff.load("nano")', ...lines].join("\n");

/** Python code that reads what a panel shows. */
export function pythonTrace(state, hook) {
  const layers = state.props?.num_layers ?? "…";
  return `import birkhoff

engine = birkhoff.load(${pyText(state.props?.model_path ?? state.props?.model ?? "nano")})
token_ids = ${JSON.stringify(tokenIds(state))}
trace = engine.trace(token_ids, hooks=[${pyText(hook)}])
row = trace[${pyText(hook)}, 0][${state.pin?.position ?? -1}]  # layers 0..${layers - 1}
print(row)`;
}
