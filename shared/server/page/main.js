// Puts the page together: the model's name, the server's health, the playground, the charts, the KV cache.

import { Refusal, UNREACHABLE, complain, field, forgetModel, servedModel } from "./api.js";
import { build as buildCharts, update } from "./charts.js";
import { build as buildMemory } from "./memory.js";
import { build as buildPlayground } from "./playground.js";

const PERIOD = 1000; // milliseconds between readings of the metrics
const PATIENCE = 5000; // milliseconds after which a server without an answer counts as not reachable
let isReachable = true;

async function showModel() {
  try {
    const { id, max_model_len: longest } = await servedModel();
    document.title = `${id} · infer`;
    byId("model").textContent = `${id}, up to ${longest} tokens`;
    field("max_tokens").max = String(longest);
  } catch (error) {
    byId("model").textContent = error instanceof Refusal && error.status === 401 ? "needs an API key" : "";
  }
}

/** @param {string} path */
async function read(path) {
  return fetch(path, { signal: AbortSignal.timeout(PATIENCE) });
}

async function showHealth() {
  let health = /** @type {{status: string, message?: string, ready?: boolean}} */ ({ status: "not reachable", message: UNREACHABLE });
  let metrics = /** @type {string | null} */ (null);
  try {
    [health, metrics] = [await (await read("health")).json(), await (await read("metrics")).text()];
  } catch {
    forgetModel();
  }
  if (metrics !== null && !isReachable) showModel();
  isReachable = metrics !== null;
  byId("health").textContent = health.ready ? "ready" : health.status;
  byId("health").dataset.state = health.ready ? "ready" : "down";
  complain("trouble", health.ready ? "" : (health.message ?? `The server takes no requests: ${health.status}.`));
  update(metrics, Boolean(health.ready), byId("totals"));
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
