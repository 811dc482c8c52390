// Steering modules and SAEs of the server.
import { call } from "./api.js";

export async function loadVectors(store) {
  const found = await call("/v1/steering/modules");
  const modules = Array.isArray(found.modules)
    ? found.modules
    : Object.entries(found.modules ?? found).map(([name, rest]) => ({
        name,
        ...(typeof rest === "object" ? rest : {}),
      }));
  store.set({
    vectors: modules
      .filter((m) => (m.kind ?? "additive") === "additive")
      .map((m) => ({
        ...m,
        strength: m.strength ?? m.recommended_strength,
        title: m.hook
          ? `${m.name} (${m.hook}${m.layers ? ` ${[].concat(m.layers).join(",")}` : ""})`
          : m.name,
      })),
  });
  if (!store.state.vector && store.state.vectors.length) store.set({ vector: store.state.vectors[0].name });
}

export async function loadSaes(store) {
  const found = await call("/v1/saes");
  const saes = (found.saes ?? found.data ?? found).map((s) => ({
    ...s,
    title: s.hook ? `${s.name} (${s.hook} ${s.layer ?? ""}, ${s.view ?? ""})` : s.name,
  }));
  store.set({ saes, sae: store.state.sae ?? saes[0]?.name ?? null });
}
