// Runs the model: one streamed request at a time, with all signals the panels need.
import { ordinary } from "./pinned.js";
import { call, post, stream } from "./api.js";
import { interventions } from "./edits.js";
import { newRun } from "./store.js";

export const SIGNALS = ["res_mix", "pre_mix", "post_mix", "stream_norm", "experts"];
const TOP = 8;
let current = null;

export function stopRun(store) {
  current?.abort();
  current = null;
  if (store.state.run.status === "running") store.set({ run: { ...store.state.run, status: "stopped" } });
}

/** `options`: messages, or `prompt` (token ids of a text to go on from, with `given` tokens already written);
 *  `steered` adds the bench's edits, `baseline` the unsteered twin beside them. */
export async function startRun(store, options) {
  stopRun(store);
  const control = (current = new AbortController()),
    run = { ...newRun(), status: "running", started: performance.now(), pair: Boolean(options.baseline) };
  run.messages = options.messages ?? null;
  const keep = options.keepOld && store.state.run.tokens.length ? store.state.run : null;
  if (!keep) store.set({ run, pin: null, asked: {} });
  const publish = () => {
    if (current === control) store.set({ run: { ...run } });
  };
  try {
    const tokenized = options.prompt
      ? await textTokens(options.prompt, control.signal)
      : await post("/tokenize", { messages: options.messages, return_token_strs: true }, control.signal);
    run.prompt = tokenized.tokens.map((id, position) => ({
      id,
      position,
      text: tokenized.token_strs[position],
      prompt: true,
    }));
    const steered = options.steered ? interventions(store.state.edits, ordinary(store.state)) : [];
    if (options.baseline) run.twin = { tokens: [], reasoning: "" };
    if (keep) store.set({ run, pin: store.state.pin, asked: {} });
    const settings = store.state.settings,
      signals = [...SIGNALS];
    if (store.state.vector && store.state.scalar === "cosine") signals.push(`cosine:${store.state.vector}`);
    const body = {
      stream: true,
      seed: settings.seed,
      temperature: settings.temperature,
      max_tokens: settings.maxTokens,
      return_token_ids: true,
      ...(ordinary(store.state) ? {} : { signals }),
      ...(steered.length ? { interventions: steered } : {}),
      ...(options.baseline ? { baseline: true } : {}),
    };
    if (options.prompt) Object.assign(body, { prompt: options.prompt, logprobs: TOP });
    else Object.assign(body, { messages: options.messages, logprobs: true, top_logprobs: TOP });
    for await (const chunk of stream(
      options.prompt ? "/v1/completions" : "/v1/chat/completions",
      body,
      control.signal,
    )) {
      read(run, chunk);
      publish();
    }
    run.status = "done";
  } catch (error) {
    run.status = error.name === "AbortError" ? "stopped" : "error";
    if (run.status === "error") run.error = error;
  }
  run.seconds = (performance.now() - run.started) / 1000;
  publish();
  return run;
}

async function textTokens(ids, signal) {
  const pieces = await post("/detokenize", { tokens: ids, return_token_strs: true }, signal);
  return { tokens: ids, token_strs: pieces.token_strs };
}

/** Adds a chunk to a run. Chats and completions carry logprobs in different fields. */
export function read(run, chunk) {
  run.id = chunk.id ?? run.id;
  const twin = Boolean(chunk.baseline) && !Array.isArray(chunk.baseline),
    side = twin ? run.twin : run;
  for (const choice of chunk.choices ?? []) {
    if (!side) continue;
    if (choice.delta?.reasoning_content) side.reasoning += choice.delta.reasoning_content;
    const result =
      choice.logprobs?.content?.map((entry) => ({
        text: entry.token,
        logprob: entry.logprob,
        top: entry.top_logprobs?.map((o) => ({ text: o.token, logprob: o.logprob })) ?? [],
      })) ??
      choice.logprobs?.tokens?.map((text, i) => ({
        text,
        logprob: choice.logprobs.token_logprobs[i],
        top: Object.entries(choice.logprobs.top_logprobs?.[i] ?? {})
          .map(([t, l]) => ({ text: t, logprob: l }))
          .sort((a, b) => b.logprob - a.logprob),
      })) ??
      [];
    result.forEach((token, i) =>
      side.tokens.push({
        ...token,
        id: choice.token_ids?.[i],
        position: run.prompt.length + side.tokens.length,
      }),
    );
    if (choice.finish_reason) side.finish = choice.finish_reason;
  }
  for (const frame of Array.isArray(chunk.signals) ? chunk.signals : [])
    (twin ? run.twinFrames : run.frames).set(frame.position, frame);
  if (chunk.interp) run.interp = chunk.interp;
  if (chunk.timings) run.timings = chunk.timings;
  if (chunk.warnings) run.warnings = chunk.warnings;
}

export const answerText = (side) => side.tokens.map((token) => token.text).join("");

/** First position at which the steered and unsteered outputs differ, or null. */
export function firstDifference(run) {
  if (!run.twin) return null;
  for (let i = 0; i < Math.min(run.tokens.length, run.twin.tokens.length); i++)
    if (run.tokens[i].text !== run.twin.tokens[i].text) return run.prompt.length + i;
  return null;
}

/** KL divergence of steered from unsteered at one position, over the top tokens and the remainder. */
export function divergence(steered, plain) {
  if (!steered?.top?.length || !plain?.top?.length) return null;
  const other = new Map(plain.top.map((t) => [t.text, Math.exp(t.logprob)])),
    floor = Math.max(1e-6, (1 - [...other.values()].reduce((a, b) => a + b, 0)) / 50);
  let total = 0,
    steeredMass = 0,
    plainMass = 0;
  for (const { text, logprob } of steered.top) {
    const p = Math.exp(logprob),
      q = other.get(text) ?? floor;
    total += p * Math.log(p / q);
    steeredMass += p;
    plainMass += q;
  }
  const rest = Math.max(1 - steeredMass, 1e-9),
    left = Math.max(1 - Math.min(plainMass, 1), 1e-9);
  return Math.max(0, total + rest * Math.log(rest / left));
}

/** Share of 4-grams that occurred before; 0 means no repetition. */
export function repetition(tokens) {
  const seen = new Set();
  let repeated = 0,
    groups = 0;
  for (let i = 0; i + 4 <= tokens.length; i++) {
    const key = tokens
      .slice(i, i + 4)
      .map((t) => t.text)
      .join("\u0001");
    if (seen.has(key)) repeated++;
    seen.add(key);
    groups++;
  }
  return groups ? repeated / groups : 0;
}

export async function refreshProps(store) {
  const props = await call("/props");
  store.set({ props: shape(props), connected: true });
}

/** /props under the names the page uses. */
function shape(props) {
  return {
    ...props,
    num_layers: props.layers,
    num_streams: props.streams,
    num_experts: props.experts,
    hidden: props.hidden_size,
    hash_routed_layers: Array.from({ length: props.hash_layers ?? 0 }, (_, i) => i),
    sites: props.hooks ?? {},
  };
}
