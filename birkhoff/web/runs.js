// Runs the model: one streamed request at a time, with all signals the panels need.
import { ordinary } from "./pinned.js";
import { call, post, stream } from "./api.js";
import { interventions } from "./edits.js";
import { newRun, tokensOf } from "./store.js";

const SIGNALS = ["res_mix", "pre_mix", "post_mix", "stream_norm", "experts"];
const TOP = 8;
let current = null;

/** The run, pin and answers of a page: chat and bench have their own, so that neither loses what the other shows. A
 *  saved file has one run. */
export const runOf = (state, page) => (page === state.runPage || state.frozen ? state : state.aside);

function put(store, page, changes) {
  if (page === store.state.runPage) store.set(changes);
  else store.set({ aside: { ...store.state.aside, ...changes } });
}

/** Lets the panels show the run of a page. */
export function showRun(store, page) {
  const { runPage, aside, run, pin, asked, answers } = store.state;
  if (page === runPage) return;
  store.state.answers = { ...aside.answers, contrast: answers.contrast };
  store.set({
    run: aside.run,
    pin: aside.pin,
    asked: aside.asked,
    runPage: page,
    aside: { run, pin, asked, answers },
  });
}

export function stopRun(store) {
  current?.abort();
  current = null;
  for (const page of ["chat", "steer"]) {
    const { run } = runOf(store.state, page);
    if (run.status === "running") put(store, page, { run: { ...run, status: "stopped" } });
  }
}

/** `options`: messages, and to go on from within an answer to them `branch`: `{tokens, prompt, frames}`, the kept
 *  tokens of the answer and, where known, the tokens of the prompt and the frames of both. `steered` adds the bench's edits, `baseline`
 *  the unsteered twin beside them: that is a run of the bench. */
export async function startRun(store, options) {
  stopRun(store);
  const control = (current = new AbortController()),
    page = options.baseline ? "steer" : "chat",
    own = runOf(store.state, page),
    run = { ...newRun(), status: "running", started: performance.now(), pair: Boolean(options.baseline) };
  run.messages = options.messages ?? null;
  const keep = options.keepOld && own.run.tokens.length > 0;
  own.answers = { contrast: own.answers.contrast };
  if (!keep) put(store, page, { run, pin: null, asked: {} });
  const publish = () => {
    if (current === control) put(store, page, { run: { ...run } });
  };
  try {
    const { branch } = options;
    run.prompt = branch?.prompt ?? (await promptTokens(options.messages, control.signal));
    if (branch) {
      run.tokens = branch.tokens.map((token, i) => ({ ...token, position: run.prompt.length + i }));
      run.kept = run.tokens.length;
      run.frames = new Map(branch.frames);
    }
    run.edits = options.steered ? store.state.edits.filter((e) => e.on && e.name) : [];
    const steered = options.steered ? interventions(store.state.edits, ordinary(store.state)) : [];
    if (options.baseline) run.twin = { tokens: [], reasoning: "" };
    if (keep) put(store, page, { run, asked: {} });
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
    if (branch) Object.assign(body, { prompt: tokensOf(run).map((token) => token.id), logprobs: TOP });
    else Object.assign(body, { messages: options.messages, logprobs: true, top_logprobs: TOP });
    for await (const chunk of stream(
      branch ? "/v1/completions" : "/v1/chat/completions",
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
  if (current === control && !runOf(store.state, page).pin) pinLast(store, page, run);
  return run;
}

async function promptTokens(messages, signal) {
  const tokenized = await post("/tokenize", { messages, return_token_strs: true }, signal);
  return tokenized.tokens.map((id, position) => ({
    id,
    position,
    text: tokenized.token_strs[position],
    prompt: true,
  }));
}

/** Pins the last token that has activations: the last one of an answer was never run through the model. */
function pinLast(store, page, run) {
  const position = Math.max(-1, ...run.frames.keys()),
    last = position >= 0 ? position : tokensOf(run).length - 1;
  if (run.tokens.length && last >= 0) put(store, page, { pin: { position: last, row: 0, twin: false } });
}

/** The entries of a chat's logprobs in the order of their tokens: those of the reasoning come first. */
export const chatEntries = (logprobs) => [...(logprobs.reasoning_content ?? []), ...logprobs.content];

/** Adds a chunk to a run. Chats and completions carry logprobs in different fields. */
export function read(run, chunk) {
  run.id = chunk.id ?? run.id;
  const twin = Boolean(chunk.baseline) && !Array.isArray(chunk.baseline),
    side = twin ? run.twin : run;
  for (const choice of chunk.choices ?? []) {
    if (!side) continue;
    if (choice.delta?.reasoning_content) side.reasoning += choice.delta.reasoning_content;
    const result =
      (choice.logprobs?.content ? chatEntries(choice.logprobs) : null)?.map((entry) => ({
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

/** Share of 4-grams of token texts that occurred before. */
export function repetition(texts) {
  const groups = texts.slice(3).map((_, i) => texts.slice(i, i + 4).join("\u0001"));
  return groups.length ? 1 - new Set(groups).size / groups.length : 0;
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
