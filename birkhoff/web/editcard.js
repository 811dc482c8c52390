// The card of one edit on the steer page: its strength, and where, when and at which tokens it acts.
import { nice } from "./chart.js";
import { streamColour } from "./colour.js";
import { h, note } from "./dom.js";
import { CLASSES, KINDS } from "./kinds.js";
import { ordinary } from "./pinned.js";

const PHASES = [
  ["both", "prompt and output"],
  ["prefill", "prompt"],
  ["decode", "output"],
];
const READS = [
  ["both", "read and carried"],
  ["read", "read only"],
  ["carry", "carried only"],
];
const featureTitle = (edit) => `feature ${edit.feature}${edit.label ? `: ${edit.label}` : ""}`;
const signed = (x) => `${x >= 0 ? "+" : ""}${nice(x)}`;

/** The card of one edit. `change(id, changes)` and `remove(id)` update the list; `unfolded` holds the ids of edits whose
    details are open. */
export function editCard(edit, state, { change, remove, unfolded }) {
  const m = ordinary(state) ? 0 : (state.props?.num_streams ?? 4),
    most = edit.most ?? 8;
  const shown = h("output", { class: "mono" }, signed(edit.strength));
  const slider = h("input", {
    type: "range",
    min: -most,
    max: most,
    step: most / 80,
    value: edit.strength,
    "aria-label": `strength of ${edit.name}`,
    "data-edit": edit.id,
    oninput: () => {
      shown.textContent = signed(Number(slider.value));
      change(edit.id, { strength: Number(slider.value) });
    },
  });
  const field = (title, node) => h("label", {}, title, node);
  const choose = (name, values) => {
    const node = h(
      "select",
      { onchange: () => change(edit.id, { [name]: node.value }) },
      values.map(([v, t]) => h("option", { value: v }, t)),
    );
    node.value = edit[name] ?? "";
    return node;
  };
  const typed = (name, title, rest = {}) =>
    field(
      title,
      h("input", {
        type: "text",
        value: edit[name] ?? "",
        style: { width: "7em" },
        onchange: (e) => change(edit.id, { [name]: e.target.value }),
        ...rest,
      }),
    );
  const head = h("div", { class: "head" },
    h("label", { class: "inline" },
      h("input", {
        type: "checkbox",
        checked: edit.on,
        onchange: (e) => change(edit.id, { on: e.target.checked }),
      }),
      h("strong", {}, edit.kind === "feature" ? featureTitle(edit) : edit.name),
    ),
    h("span", { class: "row centre" },
      KINDS[edit.kind] ? null : shown,
      h("button", {
          class: "small",
          "aria-label": `remove ${edit.name}`,
          onclick: () => remove(edit.id),
        },
        "Remove",
      ),
    ),
  );
  const phase = field("when", choose("phase", PHASES)),
    layers = typed("layers", "layers", { placeholder: "4, 2..5, *" }),
    box = (...parts) => h("div", { class: edit.on ? "edit" : "edit off", "data-kind": edit.kind }, head, parts);
  if (KINDS[edit.kind])
    return box(
      h("div", { class: "row" }, layers, KINDS[edit.kind].fields.map(([name, title]) => typed(name, title)), phase),
    );
  if (edit.kind === "feature")
    return box(slider, note(`SAE ${edit.module}: the feature is clamped to this value.`));
  const hooks = Object.entries(state.props?.sites ?? {})
    .filter(([, site]) => site.steerable)
    .map(([name]) => [name, name]);
  const single = ordinary(state) || (edit.hook && !edit.hook.startsWith("mhc_streams")),
    gates = [...state.vectors.map((v) => [v.name, `along ${v.name}`]), ...CLASSES.map((c) => [`:${c}`, c])];
  return box(
    slider,
    noteOf(edit, state),
    more(
      edit,
      unfolded,
      field("site", choose("hook", [["", "default of the vector"], ...hooks])),
      edit.hook ? layers : null,
      single ? null : streamPicker(edit, m, change),
      phase,
      single ? null : field("path", choose("path", READS)),
      field("only tokens", choose("gate", [["", "all"], ...gates])),
      edit.gate && !edit.gate.startsWith(":") ? typed("above", "above") : null,
    ),
  );
}

/** Where and when an edit acts, folded away: vectors bring a site of their own. */
function more(edit, unfolded, ...fields) {
  const node = h("details", { class: "more live" },
    h("summary", {}, "where and when"),
    h("div", { class: "row" }, fields),
  );
  node.open = unfolded.has(edit.id);
  node.addEventListener("toggle", () => (node.open ? unfolded.add(edit.id) : unfolded.delete(edit.id)));
  return node;
}

/** The buttons that choose the streams of an edit. */
function streamPicker(edit, m, change) {
  const chosen = Array.isArray(edit.streams) ? edit.streams : [];
  const button = (text, pressed, streams, rest = {}) =>
    h(
      "button",
      { "aria-pressed": String(pressed), onclick: () => change(edit.id, { streams }), ...rest },
      text,
    );
  const toggled = (s) => {
    const now = chosen.includes(s) ? chosen.filter((each) => each !== s) : [...chosen, s].sort();
    return now.length ? now : "all";
  };
  return h("span", { class: "stack" },
    h("span", { class: "note" }, "streams"),
    h("span", { class: "picker", role: "group", "aria-label": "streams" },
      button("own", edit.streams === "own", "own", { title: "streams stored with the vector" }),
      button("all", edit.streams === "all", "all"),
      Array.from({ length: m }, (_, s) =>
        button(`${s}`, chosen.includes(s), toggled(s), { style: { "border-color": streamColour(s) } }),
      ),
    ),
  );
}

/** What is known about the vector of an edit: its note, how it was made, and its recommended strength. */
function noteOf(edit, state) {
  const known = edit.kind === "vector" ? state.vectors.find((v) => v.name === edit.name) : null;
  if (!known) return null;
  const facts = [
    known.note,
    known.method ? `made by ${known.method}` : null,
    known.hook ? `acts at ${known.hook}, layer ${[].concat(known.layers).join(", ")}` : null,
    known.strength ? `recommended strength ${nice(known.strength)}` : null,
  ];
  return h("p", { class: "note", "data-note": edit.name }, facts.filter(Boolean).join(" · "));
}
