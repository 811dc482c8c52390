// Edits of what decides: mixers, routers, attention. A kind has text fields, and a form in `interventions`.

const numbers = (text) =>
  text.split(",").map((part) => {
    if (!/^\s*\d+\s*$/.test(part)) throw new Error(`“${part}” is no number from 0. Write 3, or 3,5.`);
    return Number(part);
  });
/** Positions such as 0,1, or a text of the prompt. */
const tokens = (text) => (/^[\d,\s]+$/.test(text) ? numbers(text) : { text });
const factor = (text) => {
  if (!(Number(text) >= 0)) throw new Error(`“${text}” is no factor of 0 or more.`);
  return Number(text);
};
/** The fields that are filled in, read. */
const read = (edit, readers) =>
  Object.fromEntries(
    Object.entries(readers)
      .filter(([name]) => edit[name]?.trim())
      .map(([name, reader]) => [name, reader(edit[name])]),
  );

/** `fields`: name, label, first value. `layers` is a field of every kind. */
export const KINDS = {
  mixer: {
    title: "a mixer",
    fields: [
      ["hook", "mixer", "mhc_res_mix"],
      ["source", "becomes", "identity"],
    ],
    wire: (edit) => ({ op: "patch", source: edit.source }),
  },
  experts: {
    title: "the router",
    fields: [
      ["force", "always these experts", "0"],
      ["ban", "never these", ""],
    ],
    wire: (edit) => ({ op: "experts", ...read(edit, { force: numbers, ban: numbers }) }),
  },
  attention: {
    title: "attention",
    fields: [
      ["heads", "heads (alone: taken out)", ""],
      ["mask", "hidden tokens: 0,1 or a text", "0"],
      ["sink", "sink times", ""],
      ["forbid", "blocks never chosen", ""],
    ],
    wire: (edit) => {
      const { forbid, ...fields } = read(edit, { heads: numbers, mask: tokens, sink: factor, forbid: numbers });
      return { op: "attention", ...fields, ...(forbid ? { blocks: { forbid } } : {}) };
    },
  },
};

/** Classes of tokens that a gate can name, beside vectors. */
export const CLASSES = ["digits", "letters", "capitalised", "punctuation", "newlines"];

/** The gate of an edit: the tokens of a class, or where the component along a vector is above a number. */
export const gateOf = ({ gate, above }) =>
  gate.startsWith(":") ? { tokens: gate.slice(1) } : { vector: `@${gate}`, above: Number(above ?? 0) };
