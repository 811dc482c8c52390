// The chat page: messages, the running response as tokens, and the input box.
import { fault, fill, h, note, panel, stack, toast, visible } from "./dom.js";
import { branchPython, chatPython } from "./python.js";
import { post } from "./api.js";
import { answerText, runOf, startRun, stopRun } from "./runs.js";
import { strip, update } from "./strip.js";

const EXAMPLES = [
  "Tell me a story about a fox and a boat.",
  "Write a poem about the sea.",
  "Tell me a spooky campfire story about an old clock.",
  "Explain the moon to a child.",
];

export function chatPage(store) {
  const list = h("div", { class: "conversation" }),
    answer = stack(),
    tokens = strip([], { name: "answer" });
  const box = h("textarea", {
    rows: 3,
    id: "ask",
    placeholder: "Tell me a story about a fox.",
    "aria-label": "Your message",
    onkeydown: (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        sendMessage();
      }
    },
    oninput: () => {
      store.state.draft = box.value;
    },
  });
  const send = h("button", { class: "main", id: "send", onclick: () => sendMessage() },
    "Ask",
  );
  const stop = h("button", { id: "stop", onclick: () => stopRun(store) }, "Stop");
  const tint = h(
    "select",
    { "aria-label": "colour tokens by", onchange: () => store.set({ tint: tint.value }) },
    [
      ["surprise", "surprise"],
      ["probability", "probability"],
      ["none", "nothing"],
    ].map(([v, t]) => h("option", { value: v }, t)),
  );
  const number = (name, title, props) => {
    const input = h("input", {
      type: "number",
      ...props,
      style: { width: "6.4em" },
      onchange: () => store.set({ settings: { ...store.state.settings, [name]: Number(input.value) } }),
    });
    return [h("label", {}, title, input), input];
  };
  const [temperature, temperatureBox] = number("temperature", "temperature", { min: 0, max: 2, step: 0.1 });
  const [length, lengthBox] = number("maxTokens", "max tokens", { min: 1, max: 4096, step: 1 });
  const [seed, seedBox] = number("seed", "seed", { min: 0, step: 1 });

  const ask = (messages) => startRun(store, { messages, steered: store.state.steerChat, baseline: false });
  async function sendMessage(given) {
    const text = given ?? box.value.trim();
    if (!text) {
      box.focus();
      return;
    }
    const messages = [...finished(store.state), { role: "user", content: text }];
    box.value = store.state.draft = "";
    store.set({ conversation: messages });
    await ask(messages);
  }
  /** All messages, including the last response. */
  function finished(state) {
    const transcript = [...state.conversation],
      text = answerText(runOf(state, "chat").run);
    if (transcript.length && transcript.at(-1).role === "user") {
      if (text) transcript.push({ role: "assistant", content: text });
      else transcript.pop();
    }
    return transcript;
  }
  const retry = () => {
    store.set({ settings: { ...store.state.settings, seed: store.state.settings.seed + 1 } });
    ask(store.state.conversation);
  };
  async function branch(token, other) {
    const { run } = runOf(store.state, "chat");
    try {
      toast(`Continuing from “${other.text.trim()}”.`);
      await startRun(store, {
        messages: run.messages,
        branch: await branchOf(run, token, other),
        steered: store.state.steerChat,
      });
    } catch (error) {
      toast(error.message);
    }
  }

  const again = h("button", { id: "retry", onclick: retry }, "Retry"),
    steered = h("input", {
      type: "checkbox",
      id: "steer-chat",
      onchange: () => store.set({ steerChat: steered.checked }),
    });
  const node = stack(
    panel(
      "Chat",
      "Hover over a token for its probability, click it to pin it in all panels, " +
        "and pick an alternative to branch.",
      {
        name: "chat",
        data: () => ({ messages: store.state.conversation, tokens: runOf(store.state, "chat").run.tokens }),
        python: () => pythonOf(store.state),
      },
      stack(
        list,
        answer,
        h("div", { class: "stack live" },
          box,
          h("div", { class: "row" },
            send,
            stop,
            again,
            h("button", {
                onclick: () => {
                  stopRun(store);
                  store.set({
                    conversation: [],
                    run: {
                      ...store.state.run,
                      tokens: [],
                      prompt: [],
                      twin: null,
                      frames: new Map(),
                      status: "idle",
                      error: null,
                    },
                    pin: null,
                  });
                  box.focus();
                },
              },
              "New",
            ),
          ),
          h("div", { class: "row" },
            temperature,
            length,
            seed,
            h("label", {}, "colour by", tint),
            h("label", { class: "inline" },
              steered,
              "apply edits of the Steer page",
            ),
          ),
        ),
      ),
    ),
  );
  store.on(["settings"], ({ settings }) => {
    temperatureBox.value = settings.temperature;
    lengthBox.value = settings.maxTokens;
    seedBox.value = settings.seed;
  });
  store.on(["draft"], ({ draft }) => {
    box.value = draft;
  });
  store.on(["steerChat"], ({ steerChat }) => {
    steered.checked = steerChat;
  });
  store.on(["conversation"], ({ conversation }) =>
    fill(
      list,
      conversation.length
        ? conversation.map((m) =>
            h(
              "div",
              { class: `message ${m.role}` },
              h("div", { class: "who" }, m.role === "user" ? "you" : m.role),
              h("div", { class: "text" }, visible(m.content)),
            ),
          )
        : h("div", { class: "empty examples live" },
            h("p", {}, "No messages yet. Try one of these:"),
            EXAMPLES.map((text) =>
              h("button", { class: "example", onclick: () => sendMessage(text) }, text),
            ),
          ),
    ),
  );
  store.on(["run", "aside", "pin", "tint", "theme"], (state) => {
    const { run, pin } = runOf(state, "chat"),
      busy = run.status === "running";
    stop.disabled = !busy;
    again.disabled = busy || !state.conversation.length;
    tint.value = state.tint;
    if (run.status === "idle") return fill(answer);
    const info = busy
      ? run.tokens.length
        ? `${run.tokens.length} tokens…`
        : "processing the prompt…"
      : [
          `${run.tokens.length} tokens`,
          run.seconds ? `${((run.tokens.length - run.kept) / run.seconds).toFixed(0)} tokens/s` : "",
          run.kept ? `${run.kept} kept from before the branch` : "",
          run.status === "stopped" ? "stopped" : "",
          run.finish === "length" ? "max tokens reached" : "",
        ]
          .filter(Boolean)
          .join(", ");
    update(tokens, run.tokens, {
      name: "answer",
      mode: state.tint,
      paint: document.documentElement.dataset.theme,
      pinned: pin?.twin ? null : pin?.position,
      onPin: (token) => store.set({ pin: { position: token.position, row: pin?.row ?? 0, twin: false } }),
      branch: state.frozen ? null : branch,
    });
    fill(
      answer,
      h("div", { class: "message assistant", "aria-busy": String(busy) },
        h("div", { class: "who" }, h("span", {}, run.author ?? "model"), h("span", {}, info)),
        run.reasoning
          ? h("details", { class: "reasoning" },
              h("summary", {}, "reasoning"),
              h("div", { class: "text" }, visible(run.reasoning)),
            )
          : null,
        run.error ? fault(run.error) : null,
        run.warnings?.length ? note(run.warnings.join(" ")) : null,
        tokens,
      ),
    );
  });
  return node;
}

function pythonOf(state) {
  if (state.run.kept) return branchPython(state);
  const messages = state.conversation.length ? state.conversation : (state.run.messages ?? []);
  return chatPython(state, messages, state.run.edits ?? []);
}

/** The answer up to a token, with that token replaced by an alternative. */
async function branchOf(run, token, other) {
  const question = { prompt: other.text, add_special_tokens: false, return_token_strs: true },
    encoded = await post("/tokenize", question),
    before = run.tokens.filter((t) => t.position < token.position);
  const chosen = encoded.tokens.map((id, i) => ({
    ...(i ? {} : { logprob: other.logprob, top: token.top }),
    id,
    text: encoded.tokens.length === 1 ? other.text : encoded.token_strs[i],
  }));
  const frames = [...run.frames].filter(([position]) => position < token.position);
  return { prompt: run.prompt, tokens: [...before, ...chosen], frames };
}
