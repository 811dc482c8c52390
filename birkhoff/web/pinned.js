// The pinned token, which all panels show.
import { post } from "./api.js";
import { empty, fault, fill } from "./dom.js";
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

/** Whether the model is an ordinary one, with one residual stream. */
export const ordinary = (state) => Boolean(state.props) && !state.props.num_streams;

/** Why a view of parts that only DeepSeek-V4 has stays empty; null where it makes sense. */
export const notHere = (state, what) =>
  ordinary(state) ? `${what}: this model has one residual stream and no such parts.` : null;

/**
 * Asks the server about the pinned token whenever the pin or the text changes, and calls `draw(answer)`. Returns a
 * function that gives the last answer, or null.
 */
export function askAboutPin(store, body, { path, fields = {}, hint, delay, v4 }, draw) {
  let answer = null,
    requestKey = "",
    timer = 0,
    stop = null;
  const load = async () => {
    const state = store.state;
    if (v4 && ordinary(state)) {
      fill(body, empty(notHere(state, v4)));
      return;
    }
    if (!pinnedToken(state)) {
      answer = null;
      requestKey = "";
      fill(body, empty(hint));
      return;
    }
    const ids = tokenIds(state, state.pin.position),
      key = ids.join();
    if (key === requestKey) return;
    requestKey = key;
    stop?.abort();
    stop = new AbortController();
    try {
      const result = await post(path, { token_ids: ids, position: -1, ...fields }, stop.signal);
      if (requestKey === key) draw((answer = result));
    } catch (error) {
      if (error.name !== "AbortError") {
        requestKey = "";
        fill(body, fault(error));
      }
    }
  };
  store.on(["pin", "run", "props"], (state) => {
    clearTimeout(timer);
    if (state.run.status !== "running") timer = setTimeout(load, delay);
  });
  store.on(["theme"], () => answer && draw(answer), false);
  return () => answer;
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
