// Circuits: the nodes that a prediction needs, and edges between them through each stream, drawn by the server.
import { post } from "./api.js";
import { streamLegend } from "./colour.js";
import { empty, fault, fill, h, panel, stack } from "./dom.js";
import { script } from "./python.js";

const STORY = "One day, NAME had a red ball. A boy wanted it. He asked";
const FIELDS = {
  prompt: ["text", STORY.replace("NAME", "Lily")],
  baseline: ["baseline: a text of as many tokens, or zero", STORY.replace("NAME", "Anna")],
  token: ["token", " Lily"],
  other: ["minus token", " Anna"],
};
const percent = (share) => `${(share * 100).toFixed(0)} %`;

export function circuitPage(store) {
  const inputs = {},
    body = stack(empty("Find the parts of the model that a prediction needs.")),
    button = h("button", { class: "main", type: "submit" }, "Find the circuit");
  let answer = {};
  const asked = () => {
    const { prompt, baseline, token, other } = Object.fromEntries(
      Object.entries(inputs).map(([name, input]) => [name, input.value]),
    );
    return { prompt, baseline, metric: { token, ...(other ? { other } : {}) } };
  };
  const run = async (event) => {
    event.preventDefault();
    const { baseline, ...fields } = asked();
    button.disabled = true;
    fill(body, empty("Attributing, then ablating …"));
    try {
      answer = await post("/v1/circuit", {
        ...fields,
        baseline: ["zero", "mean"].includes(baseline) ? baseline : { prompt: baseline },
        svg: true,
      });
      const { nodes, candidates, faithfulness, full, random, completeness, svg } = answer,
        said =
          `${nodes.length} of ${candidates} nodes keep ${percent(faithfulness)} of the metric (${full.toFixed(2)}). Random ` +
          `sets of as many nodes keep ${percent(random)}; without these nodes ${percent(1 - completeness)} is left.`,
        streams = store.state.props?.num_streams ?? 0, // one residual stream has no lines
        src = `data:image/svg+xml,${encodeURIComponent(svg)}`,
        alt = `circuit: ${nodes.map((node) => `${node.hook}[${node.layer}] at ${node.position}`).join(", ")}`;
      fill(body, h("p", {}, said), h("div", { class: "figure scroll" }, h("img", { src, alt })), streamLegend(streams));
    } catch (error) {
      fill(body, fault(error));
    }
    button.disabled = false;
  };
  const python = () => {
    const { prompt, metric, baseline } = asked();
    return script(store.state, [
      `circuit = engine.circuit(${JSON.stringify(prompt)}, ${JSON.stringify(metric)}, baseline=${JSON.stringify(baseline)})`,
      'print(circuit, *circuit.nodes, sep="\\n")',
      'open("circuit.svg", "w").write(circuit.svg())',
    ]);
  };
  return panel(
    "Circuit",
    "The nodes that a prediction needs: ranked by gradients, verified by moving all others to the baseline. Lines are " +
      "estimates of what one sends to a later one through a stream; dashed: against the metric.",
    { wide: true, name: "circuit", data: () => answer, python },
    h("form", { class: "stack", onsubmit: run },
      Object.entries(FIELDS).map(([name, [label, value]]) =>
        h("label", {}, label, (inputs[name] = h("input", { type: "text", value }))),
      ),
      button,
    ),
    body,
  );
}
