// A short tour: a card that walks through the page and outlines what it speaks of.
import { fill, h } from "./dom.js";

/** [element it points at, page to open, text]; null leaves the page as it is. */
const STOPS = [
  ["#page-chat", { talkPage: "chat" }, "Ask something, or click an example. The answer appears token by token, coloured by surprise."],
  ['[data-strip="answer"]', { talkPage: "chat" }, "Click a token to pin it. Every picture shows the pinned token; the last one is pinned for you."],
  ['[data-panel="heatmap"]', { lookPage: "inside" }, "Tokens from left to right, layers from top to bottom. Choose what the colours show."],
  ['[data-panel="film"]', { lookPage: "inside" }, "DeepSeek-V4 carries four streams instead of one. These tiles show how each sublayer mixes them."],
  ["#page-features", { lookPage: "features" }, "Features: directions with a meaning. Search for a word, open one, and clamp it."],
  ["#page-steer", { talkPage: "steer" }, "Steer: one click shows the same answer with and without a vector."],
  ["#page-chat", { talkPage: "chat", lookPage: "inside" }, "Every panel has “What am I looking at?” and a Share menu: data, Python, PNG, SVG, a link, or a file that needs no server."],
];

export function startTour(store) {
  document.getElementById("tour-card")?.remove();
  let at = 0,
    shown = null;
  const text = h("p", {}),
    count = h("span", { class: "note" }),
    back = h("button", { class: "small", onclick: () => go(at - 1) }, "Back"),
    next = h("button", { class: "small main", id: "tour-next", onclick: () => go(at + 1) }, "Next");
  const close = () => {
    shown?.classList.remove("toured");
    card.remove();
    document.getElementById("tour")?.focus();
  };
  const card = h(
    "div",
    { id: "tour-card", class: "tour", role: "dialog", "aria-label": "Tour", tabindex: -1 },
    text,
    h(
      "div",
      { class: "row centre" },
      count,
      back,
      next,
      h("button", { class: "small", id: "tour-close", onclick: close }, "Close"),
    ),
  );
  card.addEventListener("keydown", (event) => {
    if (event.key === "Escape") close();
  });
  function go(to) {
    if (to >= STOPS.length) {
      close();
      return;
    }
    at = Math.max(0, to);
    const [selector, pages, words] = STOPS[at];
    store.set(pages);
    fill(text, words);
    fill(count, `${at + 1} of ${STOPS.length}`);
    back.disabled = at === 0;
    fill(next, at === STOPS.length - 1 ? "Done" : "Next");
    shown?.classList.remove("toured");
    requestAnimationFrame(() => {
      shown = document.querySelector(selector) ?? document.querySelector("#page-chat");
      shown.classList.add("toured");
      shown.scrollIntoView({ block: "start", behavior: "instant" });
    });
  }
  document.body.append(card);
  go(0);
  card.focus();
}
