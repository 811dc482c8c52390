// The pinned token, which all panels show.
import { post } from "./api.js";
import { empty, fault, fill } from "./dom.js";
import { tokensOf } from "./store.js";

const ANSWERS = 8; // answers about pinned tokens that are kept, for coming back to a token and for files

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
  ordinary(state) ? `${what}: recorded for DeepSeek-V4 only; this model has one residual stream.` : null;

/**
 * Asks the server about the pinned token whenever the pin or the text changes, and calls `draw(answer)`. Returns a
 * function that gives the last answer, or null.
 */
export function askAboutPin(store, body, { path, fields = {}, hint, delay, v4 }, draw) {
  let answer = null,
    requestKey = "",
    timer = 0,
    asked = 0,
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
    const kept = (state.answers[path] ??= []),
      known = kept.find((one) => one.key === key);
    if (known || state.frozen) {
      requestKey = key;
      answer = known?.result ?? null;
      if (known) draw(answer);
      else fill(body, empty("This file holds this picture only for tokens that were pinned before it was saved."));
      return;
    }
    requestKey = key;
    stop?.abort();
    stop = new AbortController();
    try {
      const result = await post(path, { token_ids: ids, position: -1, ...fields }, stop.signal);
      if (requestKey !== key) return;
      kept.unshift({ key, result });
      kept.length = Math.min(kept.length, ANSWERS);
      draw((answer = result));
    } catch (error) {
      if (error.name !== "AbortError") {
        requestKey = "";
        fill(body, fault(error));
      }
    }
  };
  store.on(["pin", "run", "props"], (state) => {
    clearTimeout(timer);
    if (state.run.status === "running") return;
    const mine = ++asked;
    body.setAttribute("aria-busy", "true"); // the picture is of the token before
    timer = setTimeout(async () => {
      await load();
      if (mine === asked) body.setAttribute("aria-busy", "false");
    }, delay);
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
