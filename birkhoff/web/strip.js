// A text as tokens: coloured, with a tooltip on hover or focus, pinned by a click.
import { amount, css, textColourOn } from "./colour.js";
import { fill, h, hideTip, placeTip, short, tokenText } from "./dom.js";

const percent = (logprob) => `${(Math.exp(logprob) * 100).toFixed(logprob > -0.01 ? 1 : 2)} %`;

/** Colour of a token by surprisal or probability; null for none. */
function tint(token, mode) {
  if (mode === "none" || token.logprob === undefined || token.logprob === null) return null;
  if (mode === "surprise") return amount(Math.min(1, -token.logprob / 8) * 0.62);
  return amount((1 - Math.exp(token.logprob)) * 0.55);
}

/** Content of a token's tooltip; with `branch(alternative)`, alternatives get a button. */
function explain(token, branch) {
  const lines = [h("div", { class: "mono" }, `“${short(token.text, 40)}”  ·  position ${token.position}`)];
  if (token.logprob !== undefined && token.logprob !== null)
    lines.push(
      h("div", {}, `${percent(token.logprob)} probability, surprisal ${(-token.logprob).toFixed(2)} nats`),
    );
  if (token.top?.length) {
    lines.push(
      h(
        "div",
        { class: "alternatives" },
        token.top.flatMap((other) => [
          h("span", { class: "mono" }, short(other.text, 26)),
          h("span", {}, percent(other.logprob)),
          branch && other.text !== token.text
            ? h(
                "button",
                {
                  class: "small",
                  onclick: () => {
                    hideTip();
                    branch(other);
                  },
                },
                "branch",
              )
            : h("span", {}),
        ]),
      ),
    );
  }
  return lines;
}

/** Options: mode, pinned, onPin(token), branch(token, other), differsFrom(token), colourOf(token), from. */
export function strip(tokens, options = {}) {
  const node = h("div", { class: "strip", "data-strip": options.name ?? "" });
  update(node, tokens, options);
  return node;
}

function draw(token, options) {
  const rgb = options.colourOf ? options.colourOf(token) : tint(token, options.mode ?? "surprise");
  const classes = [
    "tok",
    token.prompt ? "prompt" : "",
    options.pinned === token.position ? "pinned" : "",
    options.differsFrom?.(token) ? "differs" : "",
  ];
  const node = h(
    "span",
    {
      class: classes.filter(Boolean).join(" "),
      "data-position": token.position,
      role: "button",
      tabindex: -1,
    },
    tokenText(token.text),
  );
  if (rgb) {
    node.style.backgroundColor = css(rgb);
    node.style.color = textColourOn(rgb);
  }
  return node;
}

/** Appends new tokens during generation; any other change redraws the strip. */
export function update(node, tokens, options) {
  const key = JSON.stringify([options.mode, options.pinned, options.paint ?? 0, options.from ?? 0]);
  if (
    node.dataset.key === key &&
    node.childElementCount <= tokens.length &&
    node.tokens?.[0] === tokens[0]
  ) {
    for (let at = node.childElementCount; at < tokens.length; at++) node.append(draw(tokens[at], options));
  } else
    fill(
      node,
      tokens.map((token) => draw(token, options)),
    );
  node.dataset.key = key;
  node.tokens = tokens;
  node.options = options;
  if (node.childElementCount && !node.querySelector("[tabindex='0']")) node.firstElementChild.tabIndex = 0;
  if (!node.listening) listen(node);
}

function listen(node) {
  node.listening = true;
  const of = (event) => {
    const span = event.target.closest?.(".tok");
    return span ? node.tokens.find((token) => token.position === Number(span.dataset.position)) : null;
  };
  const showTokenTip = (event, held) => {
    const token = of(event);
    if (!token) return;
    const box = event.target.closest(".tok").getBoundingClientRect(),
      branch = held && node.options.branch ? (other) => node.options.branch(token, other) : null,
      column = node.closest(".region")?.getBoundingClientRect(); // pictures beside it stay uncovered
    placeTip(box.left, box.top + box.height / 2, column, explain(token, branch)).classList.toggle(
      "held",
      Boolean(held),
    );
  };
  node.addEventListener("pointerover", (event) => {
    if (pointer.moved && !document.getElementById("tip").classList.contains("held")) showTokenTip(event, false);
  });
  node.addEventListener("pointerout", () => {
    if (!document.getElementById("tip").classList.contains("held")) hideTip();
  });
  const pick = (event) => {
    const token = of(event);
    if (!token) return;
    node.options.onPin?.(token);
    showTokenTip(event, true);
    event.stopPropagation();
  };
  node.addEventListener("click", pick);
  node.addEventListener("keydown", (event) => {
    const span = event.target.closest?.(".tok");
    if (!span) return;
    const next = { ArrowRight: span.nextElementSibling, ArrowLeft: span.previousElementSibling }[event.key];
    if (next) {
      event.preventDefault();
      span.tabIndex = -1;
      next.tabIndex = 0;
      next.focus();
      showTokenTip({ target: next }, false);
    } else if (event.key === "Enter" || event.key === " ") {
      event.preventDefault();
      const position = span.dataset.position;
      pick(event);
      requestAnimationFrame(() => node.querySelector(`[data-position="${position}"]`)?.focus());
    } else if (event.key === "Escape") hideTip();
  });
}
// An answer that grows under a resting pointer, left where it clicked “Ask”, is not pointed at.
const pointer = { moved: false };
document.addEventListener("pointermove", (event) => {
  if (event.movementX || event.movementY) pointer.moved = true;
});
document.addEventListener("click", (event) => {
  pointer.moved = false;
  if (!event.target.closest?.(".tip")) hideTip();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") hideTip();
});
