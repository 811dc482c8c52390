// The requests page (active requests) and the captures page (captured files).
import { call, keys, post } from "./api.js";
import { empty, fault, fill, h, note, panel, stack, table, toast, visible } from "./dom.js";
import { Heatmap } from "./heatmap.js";
import { download } from "./picture.js";
import { memoryCapture, safetensors, sliceOf } from "./tensors.js";

const KEPT = 8; // captures in the page's memory

export function requestPage(store) {
  const body = stack();
  let last = null;
  const node = stack(
    panel(
      "Requests",
      "Active requests and their progress. Refreshed every two seconds while this page is open.",
      {
        name: "requests",
        data: () => last ?? {},
        python: () =>
          [
            "import json, urllib.request",
            "",
            `print(json.load(urllib.request.urlopen("${location.origin}/slots")))`,
          ].join("\n"),
      },
      body,
    ),
  );
  const cancel = async (id) => {
    try {
      await post(`/v1/requests/${encodeURIComponent(id)}/cancel`, {});
      toast("Cancelled.");
      refresh();
    } catch (error) {
      toast(error.message);
    }
  };
  const head = ["request", "state", "prompt", "computed", "generated", "max tokens", "steered", ""];
  const cells = (r) => [
    h("td", { class: "mono" }, visible(r.id)),
    h("td", { "data-name": head[1] }, r.state),
    [r.prompt_tokens, r.computed, r.output_tokens, r.max_tokens].map((n, i) =>
      h("td", { class: "number", "data-name": head[i + 2] }, String(n)),
    ),
    h("td", { "data-name": head[6] }, r.steered ? "yes" : "no"),
    h("td", {}, h("button", { class: "small", onclick: () => cancel(r.id) }, "Cancel")),
  ];
  const refresh = async () => {
    if (node.hidden || document.hidden || !node.isConnected) return;
    try {
      last = await call("/slots");
      fill(
        body,
        h("p", {}, `${last.slots - last.free} of ${last.slots} slots in use.`),
        last.requests.length
          ? table("cards", head, last.requests.map(cells))
          : empty("No active requests."),
      );
    } catch (error) {
      fill(body, fault(error));
    }
  };
  fill(body, empty("Loading…"));
  setInterval(refresh, 2000);
  store.on(["lookPage"], refresh);
  return node;
}

export function capturePage(store) {
  const list = stack(),
    shown = stack();
  let result = null;
  const kept = []; // captures of a server without a capture root: rows in the page's memory
  const node = stack(
    panel(
      "Captures",
      "Activations captured to files. Durable means written, synced and checksummed.",
      {
        name: "captures",
        data: () => result ?? {},
        python: () =>
          [
            "from birkhoff.capture.store.reader import read_request",
            "",
            'for entry in read_request("captures/TAG/REQUEST").values():',
            "    print(entry.layer, entry.hook, entry.array.shape)",
          ].join("\n"),
      },
      stack(
        h("div", { class: "row" },
          h("button", { onclick: () => refresh() }, "Refresh"),
          h("button", { id: "capture-now", onclick: () => take() },
            "Capture the last text",
          ),
        ),
        list,
        shown,
      ),
    ),
  );
  const cells = (c) => {
    const link = {
      href: `/v1/interp/captures/${encodeURIComponent(c.id)}/data`,
      download: `${c.id}.safetensors`,
      onclick: (event) => save(event, c.id),
    };
    const look = { class: "small", onclick: () => slice(c.id) };
    return [
      h("td", { class: "mono" }, visible(c.id)),
      h("td", { "data-name": "state" }, c.status),
      h("td", { class: "number", "data-name": "rows" }, String(c.rows ?? "")),
      h("td", { class: "number", "data-name": "kilobytes" }, ((c.bytes ?? NaN) / 1000).toFixed(0)),
      h("td", {}, h("a", link, "download"), " ", h("button", look, "look")),
    ];
  };
  const refresh = async () => {
    if (node.hidden || !node.isConnected) return;
    try {
      result = await call("/v1/interp/captures");
      const captures = [...kept, ...result.captures];
      fill(
        list,
        captures.length
          ? table("cards", ["id", "state", "rows", "kilobytes", ""], captures.map(cells))
          : empty("No captures yet."),
        store.state.props && !store.state.props.captures?.filesystem
          ? note(
              "This server stores no files, so captures stay in this page. Start it with --capture-root DIR to " +
                "keep them.",
            )
          : null,
      );
    } catch (error) {
      fill(list, fault(error));
    }
  };
  /** A browser download sends no API key, so with a key set a signed link is requested first. */
  async function save(event, id) {
    const own = kept.find((c) => c.id === id);
    if (!own && !keys.get()) return;
    event.preventDefault();
    if (own) {
      download(`${id}.safetensors`, new Blob(safetensors(own.tensors)));
      return;
    }
    try {
      location.assign((await post(`/v1/interp/captures/${encodeURIComponent(id)}/link`)).url);
    } catch (error) {
      fill(shown, fault(error));
    }
  }
  async function take() {
    const { run, conversation: chat, benchPrompt } = store.state,
      bench = [{ role: "user", content: benchPrompt }],
      conversation = run.pair ? (run.messages ?? bench) : chat.length ? chat : bench;
    const asked = conversation.filter((m, i) => !(i === conversation.length - 1 && m.role === "assistant")),
      { props } = store.state,
      layer = Math.floor((props?.num_layers ?? 2) / 2),
      id = `page-${Date.now()}`;
    const hooks = props?.num_streams
        ? { mhc_streams_pre_attn: [layer], mhc_ffn_res_mix: "all" }
        : { post_mlp: [layer] },
      capture = props?.captures?.filesystem
        ? { filesystem: { request_id: id, tag: "page", hooks, positions: "all" } }
        : { memory: { hooks, positions: "all" } };
    try {
      const answer = await post("/v1/chat/completions", {
        messages: asked,
        max_tokens: 8,
        temperature: 0,
        capture_wait: true,
        capture,
      });
      if (capture.memory) {
        kept.unshift(memoryCapture(id, answer.capture_results.memory.tensors));
        kept.length = Math.min(kept.length, KEPT);
        toast("Captured. It is kept by this page until it is closed.");
      } else toast("Captured and durable.");
      refresh();
    } catch (error) {
      fill(shown, fault(error));
    }
  }
  async function slice(id) {
    try {
      const own = kept.find((c) => c.id === id),
        path = `/v1/interp/captures/${encodeURIComponent(id)}`,
        entry = (own?.tensors ?? (await call(path)).entries ?? [])[0];
      if (!entry) return fill(shown, empty("This capture has no rows."));
      const values = own
        ? sliceOf(entry)
        : await call(`${path}/slice?hook=${encodeURIComponent(entry.hook)}&layer=${entry.layer}`);
      const map = new Heatmap({ label: `rows of ${entry.hook}`, height: 220 });
      fill(
        shown,
        h("h3", {},
          `${entry.hook} of layer ${entry.layer}: a row per token, ${values.columns.length} numbers of each`,
        ),
        map.node,
      );
      map.show({
        columns: values.columns.length,
        rows: values.rows.map((r) => `pos ${r}`),
        value: (x, y) => values.values[y][x],
        scale: "signed",
        names: (x) => String(values.columns[x]),
      });
    } catch (error) {
      fill(shown, fault(error));
    }
  }
  fill(list, empty("Loading…"));
  store.on(["lookPage"], refresh);
  return node;
}
