// Puts the page together: the model's name, the server's health, the playground, the charts, the KV cache.

import { build as buildCharts, update } from "./charts.js";
import { build as buildMemory } from "./memory.js";
import { build as buildPlayground, headers, setModel } from "./playground.js";

const PERIOD = 1000; // milliseconds between readings of the metrics
const byId = (id) => document.getElementById(id);

async function showModel() {
  const response = await fetch("/v1/models", { headers: headers() });
  byId("key-label").hidden = response.ok && !byId("key").value;
  if (!response.ok) {
    byId("model").textContent = "needs an API key";
    return;
  }
  const [model] = (await response.json()).data;
  setModel(model.id);
  document.title = `${model.id} · infer`;
  byId("model").textContent = `${model.id}, up to ${model.max_model_len} tokens`;
  byId("max_tokens").max = model.max_model_len;
}

async function showHealth() {
  const element = byId("health");
  try {
    const health = await (await fetch("/health")).json();
    element.textContent = health.ready ? "ready" : health.status;
    element.dataset.state = health.ready ? "ready" : "down";
    await update(byId("totals"));
  } catch {
    element.textContent = "not reachable";
    element.dataset.state = "down";
  }
}

async function watch() {
  if (!document.hidden) await showHealth();
  setTimeout(watch, PERIOD);
}

buildPlayground();
buildCharts(byId("charts"));
buildMemory();
byId("key").addEventListener("change", showModel);
showModel();
watch();
