// The strength sweep of the steer page: the first edit at nine strengths, and where the output leaves the normal range.
import { post } from "./api.js";
import { lineChart, nice } from "./chart.js";
import { ink } from "./colour.js";
import { empty, fault, fill, h, note, panel, short, stack, table } from "./dom.js";
import { activeEdits, interventions, layersOf } from "./edits.js";
import { KINDS } from "./kinds.js";
import { ordinary } from "./pinned.js";
import { sweepPython } from "./python.js";
import { chatEntries, repetition } from "./runs.js";

/** The panel; `messages()` is the conversation that every strength answers. */
export function sweepPanel(store, messages) {
  const body = stack();
  const node = panel(
    "Strength sweep",
    "The first edit at nine strengths: surprisal of the output under the unsteered model, and " +
      "repetition. The knee is the largest strength before either leaves the normal range.",
    {
      name: "sweep",
      data: () => store.state.sweep ?? {},
      python: () => {
        const edits = activeEdits(store.state);
        return sweepPython(store.state, messages(), edits, strengthsOf(edits[0]));
      },
    },
    stack(
      h("div", { class: "row live" },
        h("button", { id: "sweep-run", onclick: () => sweep(store, messages()) },
          "Sweep",
        ),
      ),
      body,
    ),
  );
  store.on(["sweep", "theme"], (state) => showSweep(body, state.sweep));
  return node;
}

/** The chart and the table of a sweep, as far as it is done. */
function showSweep(body, result) {
  if (!result) return fill(body, empty("No sweep yet."));
  if (result.error) return fill(body, fault(result.error));
  const { knee, name, points, running } = result,
    done = points.filter(Boolean);
  fill(
    body,
    running
      ? h("progress", { max: points.length, value: done.length, "aria-label": "sweep" })
      : null,
    done.length > 1
      ? lineChart({
          series: [
            {
              name: "surprisal under the unsteered model (nats per token)",
              colour: ink("accent"),
              points: done.map((p) => [p.strength, p.surprise]),
            },
            {
              name: "repetition × 10",
              colour: ink("warm"),
              points: done.map((p) => [p.strength, p.repetition * 10]),
            },
          ],
          marks: knee === null ? [] : [{ x: knee, text: `knee ${nice(knee)}` }],
          xName: `strength of ${name}`,
          label: "strength sweep",
        })
      : null,
    done.length
      ? table(
          "sweep",
          ["strength", "surprisal", "answer"],
          done.map((p) => [
            h("td", { class: "number" }, nice(p.strength)),
            h("td", { class: "number" }, nice(p.surprise)),
            h("td", {}, short(p.text, 90).replace(/·/g, " ")),
          ]),
        )
      : null,
    running
      ? null
      : note(
          knee === null
            ? "Both stay in the normal range."
            : `Above ${nice(knee)} surprisal or repetition leaves the unsteered range.`,
        ),
  );
}

/** Nine strengths from 0 to the end of the slider, on the side of the present one. */
const strengthsOf = (edit) =>
  Array.from({ length: 9 }, (_, i) => (i / 8) * (edit?.most ?? 8) * ((edit?.strength ?? 1) < 0 ? -1 : 1));

async function sweep(store, messages) {
  const [first, ...rest] = activeEdits(store.state);
  if (!first || KINDS[first.kind])
    return store.set({ sweep: { error: new Error("Add an edit first; the sweep varies its strength.") } });
  const strengths = strengthsOf(first),
    points = Array(strengths.length).fill(null),
    show = (knee, running) => store.set({ sweep: { name: first.name, points, running, knee } });
  const { settings } = store.state;
  show(null, true);
  try {
    layersOf(first.layers);
    const next = strengths.entries();
    const run = async () => {
      for (const [i, strength] of next) {
        points[i] = await measure(store.state, settings, messages, strength, [{ ...first, strength }, ...rest]);
        show(null, true);
      }
    };
    await Promise.all([run(), run()]);
    const [base] = points;
    const broken = points.findIndex(
      (p) => p.surprise > base.surprise * 1.6 + 0.3 || p.repetition > base.repetition + 0.25,
    );
    show(broken > 0 ? points[broken - 1].strength : null, false);
  } catch (error) {
    store.set({ sweep: { error } });
  }
}

/** One point: the answer with these edits, its surprisal under the unsteered model, and its repetition. */
async function measure(state, { seed, temperature }, messages, strength, edits) {
  const answer = await post("/v1/chat/completions", {
    messages,
    seed,
    temperature,
    max_tokens: 64,
    return_token_ids: true,
    logprobs: true,
    ...(strength ? { interventions: interventions(edits, ordinary(state)) } : {}),
  });
  const choice = answer.choices[0],
    token_ids = [...answer.prompt_token_ids, ...choice.token_ids];
  const lens = await post("/v1/lens", { token_ids, surprise: true, views: ["head"], depths: [-1] });
  const surprisals = lens.surprise[0][0]
    .slice(answer.prompt_token_ids.length - 1, -1)
    .filter((x) => x !== null);
  return {
    strength,
    text: choice.message.content,
    surprise: surprisals.reduce((a, b) => a + b, 0) / Math.max(surprisals.length, 1),
    repetition: repetition(chatEntries(choice.logprobs).map((t) => t.token)),
  };
}
