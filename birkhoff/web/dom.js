// DOM helpers. All text from the model or the server becomes text nodes; HTML is never parsed.
import { ABOUT } from "./about.js";
import { download, toPng, toSvg } from "./picture.js";

/** h("button", {class: "main", onclick: run}, "Run") */
export function h(tag, props = {}, ...children) {
  const node = document.createElement(tag);
  if (tag === "button") node.type = "button"; // not to submit a form, unless said
  for (const [name, value] of Object.entries(props)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "style")
      for (const [key, style] of Object.entries(value)) node.style.setProperty(key, style);
    else if (name === "value" || name === "checked" || name === "selected" || name === "disabled")
      node[name] = value;
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  append(node, children);
  return node;
}

export function append(node, children) {
  for (const child of children.flat(Infinity)) {
    if (child === undefined || child === null || child === false) continue;
    node.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
}

export function fill(node, ...children) {
  node.replaceChildren();
  append(node, children);
  return node;
}

// Control and bidirectional characters, which are shown by their code point.
const HIDDEN = new RegExp(
  "[\\u0000-\\u0008\\u000b-\\u001f\\u007f-\\u009f\\u00ad\\u061c\\u200b-\\u200f" +
    "\\u202a-\\u202e\\u2060-\\u2069\\ufeff\\ufff9-\\ufffb]",
  "g",
);

// Chat markers are written with full-width bars, which many fonts lack.
const MARKER = /<｜([^｜<>]*)｜>/g;

export function visible(text) {
  return text.replace(MARKER, "<|$1|>").replace(HIDDEN, (c) => `⟨U+${c.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}⟩`);
}

/** A token as shown in a strip; line breaks get a visible mark that can be clicked. */
export function tokenText(text) {
  return text === "" ? "∅" : visible(text).replace(/\n/g, "⏎\n");
}

/** A token on one line, for tables. */
export function short(text, maxLength = 18) {
  const shown = visible(text).replace(/\n/g, "⏎").replace(/ /g, "·");
  return shown.length > maxLength ? `${shown.slice(0, maxLength - 1)}…` : shown;
}

/** A panel with a title, a description, an explanation if `about.js` has one, and a menu that shares its `data`, the
 *  `python` that computes them and its picture. */
export function panel(title, hint, { data, python, wide = false, name }, ...body) {
  const heading = h("h2", {}, title),
    about = ABOUT[name];
  return h(
    "section",
    { class: wide ? "panel wide" : "panel", "data-panel": name },
    h("header", {}, heading, h("div", { class: "tools" }, exportButtons(data, python)), h("p", { class: "hint" }, hint)),
    about
      ? h(
          "details",
          { class: "about" },
          h("summary", {}, "What am I looking at?"),
          about.map((text) => h("p", {}, text)),
        )
      : null,
    ...body,
  );
}

/** A table that scrolls. `rows` are arrays of cells. */
export function table(kind, head, rows) {
  const titles = head.map((title) => h("th", { scope: "col" }, title));
  const lines = rows.map((cells) => h("tr", {}, cells));
  return h(
    "div",
    { class: "scroll" },
    h("table", { class: kind }, h("thead", {}, h("tr", {}, titles)), h("tbody", {}, lines)),
  );
}

export const stack = (...children) => h("div", { class: "stack" }, ...children);
export const note = (...children) => h("p", { class: "note" }, ...children);
export const rowHead = (text) => h("th", { scope: "row" }, text);

export const empty = (text) => h("p", { class: "empty" }, text);
export const fault = (error) =>
  h(
    "p",
    { class: "fault", role: "alert" },
    h("strong", {}, "Error: "),
    visible(error.message ?? String(error)),
  );

let toastTimer = 0;
export function toast(text) {
  const node = document.getElementById("toast");
  node.textContent = text;
  node.classList.add("shown");
  clearTimeout(toastTimer);
  toastTimer = setTimeout(() => node.classList.remove("shown"), 2600);
}

export async function copy(text, message = "Copied.") {
  try {
    await navigator.clipboard.writeText(text);
    toast(message);
  } catch {
    // the clipboard API needs https or loopback
    const box = h("textarea", { readonly: true, "aria-label": "Copy this" });
    box.value = text;
    document.body.append(box);
    box.select();
    const done = document.execCommand("copy");
    box.remove();
    toast(done ? message : "The browser blocked copying.");
  }
}

/** The Share menu of a panel: its data, Python code that computes it, its picture, a link to it, and a file of it.
 *  Links and files hold the page's state, so these two are left to the listener of "share" events (`main.js`). */
function exportButtons(data, python) {
  const menu = h("details", { class: "menu" }, h("summary", { class: "button small" }, "Share"));
  const section = () => menu.closest(".panel");
  const file = (ending) => `birkhoff-${section().dataset.panel}.${ending}`;
  const share = (kind) => () =>
    menu.dispatchEvent(new CustomEvent("share", { bubbles: true, detail: { kind, panel: section() } }));
  const svg = () => download(file("svg"), new Blob([toSvg(section())], { type: "image/svg+xml" }));
  const png = async () => download(file("png"), await toPng(section()));
  const items = [
    ["Copy data", () => copy(JSON.stringify(data(), null, 1), "Data copied as JSON.")],
    ["Copy Python", async () => copy(await python(), "Python copied.")],
    ["Save PNG", png],
    ["Save SVG", svg],
    ["Copy link", share("link"), "live"],
    ["Save HTML", share("html"), "live"],
  ];
  const run = async (work) => {
    menu.open = false;
    try {
      await work();
    } catch (error) {
      toast(error.message);
    }
  };
  append(menu, [
    h(
      "div",
      { class: "menu-items" },
      items.map(([text, work, only]) =>
        h("button", { class: only, onclick: () => run(work) }, text),
      ),
    ),
  ]);
  menu.addEventListener("keydown", (event) => {
    if (event.key !== "Escape") return;
    menu.open = false;
    menu.firstElementChild.focus();
  });
  menu.addEventListener("focusout", (event) => {
    if (event.relatedTarget && !menu.contains(event.relatedTarget)) menu.open = false;
  });
  return menu;
}
document.addEventListener("click", (event) => {
  for (const menu of document.querySelectorAll("details.menu[open]"))
    if (!menu.contains(event.target)) menu.open = false;
});

const tip = () => document.getElementById("tip");
/** Shows the tooltip at a point, within the window and, if it fits there, within the box `within`. */
export function showTip(x, y, ...children) {
  return placeTip(x, y, null, ...children);
}
export function placeTip(x, y, within, ...children) {
  const node = fill(tip(), ...children);
  node.hidden = false;
  node.style.left = node.style.top = "0px"; // its full width, before it is measured
  const box = node.getBoundingClientRect(),
    right = Math.min(innerWidth, within?.right ?? Infinity),
    bottom = Math.min(innerHeight, within?.bottom ?? Infinity);
  node.style.left = `${Math.max(6, within?.left ?? 6, Math.min(x + 12, right - box.width - 6))}px`;
  node.style.top = `${y + 16 + box.height > bottom ? Math.max(6, y - box.height - 10) : y + 16}px`;
  return node;
}
export function hideTip() {
  const node = tip();
  node.hidden = true;
  node.classList.remove("held");
}

/** Tabs with arrow-key navigation. `pages` is [[id, title, node], ...]. */
export function tabs(name, pages, chosen, onChoose) {
  const list = h("div", { role: "tablist", "aria-label": name });
  const buttons = new Map();
  const show = (id, focus) => {
    for (const [key, , node] of pages) {
      const on = key === id,
        button = buttons.get(key);
      button.setAttribute("aria-selected", String(on));
      button.tabIndex = on ? 0 : -1;
      node.hidden = !on;
      if (on && focus) button.focus();
    }
  };
  const choose = (id, focus) => {
    show(id, focus);
    onChoose(id);
  };
  pages.forEach(([id, title, node], place) => {
    node.id = `page-${id}`;
    node.setAttribute("role", "tabpanel");
    node.setAttribute("aria-labelledby", `tab-${id}`);
    const button = h(
      "button",
      {
        role: "tab",
        id: `tab-${id}`,
        "aria-controls": `page-${id}`,
        onclick: () => choose(id),
        onkeydown: (event) => {
          const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
          if (step) {
            event.preventDefault();
            choose(pages[(place + step + pages.length) % pages.length][0], true);
          }
        },
      },
      title,
    );
    buttons.set(id, button);
    list.append(button);
  });
  choose(pages.some(([id]) => id === chosen) ? chosen : pages[0][0]);
  return { list, show };
}
