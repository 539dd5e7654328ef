// Draws what the server says of runs. Names, samples and settings are texts of others: shown by textContent alone.
"use strict";
const COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#8C8C8C"]; // Okabe and Ito's
const DASHES = ["solid", "dash", "dashdot", "dot"];
const AXES = { steps: "updates", tokens: "tokens", time: "training time (min)", FLOPs: "FLOPs" };
const CHARTS = { loss: "loss", lr: "learning rate", grad_norm: "gradient norm", tokens_per_s: "tokens/s", mfu: "MFU" };
const MOST_POINTS = 8000; // of a curve; beyond, the server is asked for fewer
const LOOK_EVERY = 2000; // milliseconds
const runs = new Map(); // path -> what is known of it
const dark = matchMedia("(prefers-color-scheme: dark)");
const $ = (id) => document.getElementById(id);

function element(tag, text, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), { textContent: text, ...properties });
  made.append(...children);
  return made;
}

function take(listed) {
  for (const path of runs.keys()) if (!listed.some((one) => one.path === path)) runs.delete(path);
  for (const news of listed) {
    const before = runs.get(news.path) ?? { shown: "train" in news, number: runs.size };
    if (news.train && !news.facts) {
      news.facts = before.facts;
      for (const kind of ["train", "val"])
        for (const key in news[kind]) news[kind][key] = before[kind][key].concat(news[kind][key]);
    }
    if (news.train?.step.length > MOST_POINTS) news.read = "";
    runs.set(news.path, { ...before, ...news });
  }
}

// nats a token compare only where the tokenizer is the same, bits per byte always
function unitOf(chosen) {
  const nats = { name: "nats a token", factor: () => 1, note: "" };
  if (new Set(chosen.map((run) => run.facts.tokenizer_id)).size < 2) return nats;
  const unknown = chosen.filter((run) => !run.facts.bytes_per_token).map((run) => run.name);
  if (unknown.length) return { ...nats, note: `Not comparable: bytes a token unknown for ${unknown.join(", ")}.` };
  const factor = (run) => 1 / (Math.LN2 * run.facts.bytes_per_token);
  return { name: "bits per byte", factor, note: "Tokenizers differ: losses are in bits per byte." };
}

// where each step lies on the axis; an evaluation knows only its step and lies between log steps
function places(run, steps, axis) {
  if (axis === "steps") return steps;
  const factor = { tokens: 1, time: 1 / 60, FLOPs: run.facts.flops_per_token }[axis];
  const known = [0, ...run.train.step], at = [0, ...run.train[axis === "time" ? "time_s" : "tokens"]];
  let i = 0;
  return steps.map((step) => {
    while (i < known.length - 2 && known[i + 1] < step) i++;
    const share = Math.min(1, (step - known[i]) / (known[i + 1] - known[i]) || 0);
    return factor && factor * (at[i] + share * ((at[i + 1] ?? at[i]) - at[i]));
  });
}

function smooth(values, weight) {
  let sum = 0, total = 0; // dividing by the weights so far keeps the first values where they are
  return values.map((value) => {
    if (value === null) return null;
    sum = weight * sum + (1 - weight) * value;
    total = weight * total + 1 - weight;
    return sum / total;
  });
}

function curves(key, chosen, axis, unit) {
  const weight = Number($("smoothing").value);
  return chosen.flatMap((run) => {
    const factor = key === "loss" ? unit.factor(run) : 1;
    const scaled = (values) => values.map((value) => value && value * factor);
    const name = run.name.replace(/&/g, "&amp;").replace(/</g, "&lt;"); // Plotly reads some HTML
    const line = { color: COLOURS[run.number % COLOURS.length], dash: DASHES[run.number % DASHES.length], width: 1.5 };
    const y = scaled(run.train[key]), x = places(run, run.train.step, axis);
    const own = { x, y: key === "lr" ? y : smooth(y, weight), line, name, mode: "lines" };
    if (key !== "loss") return [own];
    const val = { x: places(run, run.val.step, axis), y: scaled(run.val.val_loss), mode: "lines+markers" };
    const raw = { ...own, y, opacity: 0.25, hoverinfo: "skip" };
    return [raw, { ...own, name: `${name}, train` }, { ...val, name: `${name}, val`, line: { ...line, width: 3 } }];
  });
}

// up to the highest first value: a spike beyond it does not flatten the picture
function limits(traces, log) {
  const values = traces.map(({ y }) => y.filter((one) => one !== null && (!log || one > 0))).filter((y) => y.length);
  const low = Math.min(...values.map((y) => y.reduce((a, b) => Math.min(a, b))));
  const high = Math.max(...values.map((y) => y[0])), room = 0.05 * (high - low || 1);
  if (!values.length) return undefined;
  return log ? [Math.log10(low * 0.97), Math.log10(high * 1.03)] : [low - room, high + room];
}

function draw() {
  const chosen = [...runs.values()].filter((run) => run.shown && run.train);
  const axis = $("axis").value, log = $("log").checked, unit = unitOf(chosen);
  const grid = { gridcolor: dark.matches ? "#333840" : "#e4e7eb", zeroline: false, automargin: true };
  for (const key in CHARTS) {
    const traces = curves(key, chosen, axis, unit), loss = key === "loss";
    const text = loss ? `loss (${unit.name}; thick: validation)` : CHARTS[key];
    Plotly.react($(key), traces, {
      title: { text, font: { size: 14 }, x: 0.01, xanchor: "left", y: 0.97, yanchor: "top" },
      font: { color: getComputedStyle(document.body).color }, paper_bgcolor: "transparent", plot_bgcolor: "transparent",
      hoverlabel: { bgcolor: dark.matches ? "#1d2026" : "#fff", namelength: 40 }, hovermode: "x unified",
      margin: { l: 10, r: 16, t: 36, b: 10 }, showlegend: false,
      uirevision: axis + log + unit.name, // while it is the same, a zoom stays
      xaxis: { ...grid, title: { text: AXES[axis], standoff: 6 } },
      yaxis: { ...grid, type: loss && log ? "log" : "linear", rangemode: loss ? "normal" : "tozero",
        range: loss ? limits(traces, log) : undefined, tickformat: key === "mfu" ? ".0%" : undefined },
    }, { responsive: true, displayModeBar: false });
  }
  $("unit").textContent = unit.note;
  list();
  tell(chosen);
}

function list() {
  for (const run of runs.values()) {
    run.label ??= element("label", "", {},
      element("input", "", { type: "checkbox", checked: run.shown, value: run.path }),
      element("i", "", { style: `border-top: 3px solid ${COLOURS[run.number % COLOURS.length]}` }),
      element("bdi", run.name), element("span", "", { className: "faint" }));
    const step = Math.max(...[run.train, run.val].map((lines) => lines?.step.at(-1) ?? 0));
    const best = Math.min(...(run.val?.val_loss ?? []));
    run.label.lastChild.textContent = [run.running && "running", step && `step ${step.toLocaleString("en")}`,
      best < Infinity && `best val ${best.toFixed(4)}`].filter(Boolean).join(", ");
  }
  const labels = [...runs.values()].map((run) => run.label);
  if (labels.some((label, place) => $("runs").children[place] !== label)) $("runs").replaceChildren(...labels);
}

function tell(chosen) {
  const table = (rows) => element("table", "", {}, ...rows.map(([head, ...cells]) =>
    element("tr", "", {}, element("th", head), ...cells.map((cell) => element("td", cell ?? "")))));
  const compared = (what, all) => {
    const keys = new Set(chosen.flatMap((run) => Object.keys(run.facts[what])));
    const rows = [...keys].map((key) => [key, ...chosen.map((run) => run.facts[what][key])]);
    const kept = rows.filter(([, ...cells]) => all || new Set(cells).size > 1);
    return [table([["", ...chosen.map((run) => run.name)], ...kept])];
  };
  const each = (key, make) =>
    chosen.filter((run) => run[key].length).flatMap((run) => [element("h2", run.name), ...make(run[key])]);
  const row = ([name, bytes, saved]) =>
    [name, `${(bytes / 2 ** 20).toFixed(1)} MiB`, new Date(saved * 1000).toLocaleString()];
  const parts = {
    samples: each("samples", (all) =>
      all.toReversed().flatMap(({ step, text }) => [element("b", `step ${step}`), element("pre", text)])),
    settings: compared("settings", chosen.length < 2),
    checkpoints: each("checkpoints", (all) => [table(all.map(row))]),
    notes: each("notes", (all) => all.map((note) => element("p", note))),
    environment: compared("environment", true),
  };
  for (const name in parts) {
    const made = element("div", "", {}, ...parts[name]), old = $(name).lastElementChild;
    if (!made.isEqualNode(old)) old.replaceWith(made); // an equal one stays, and with it what the reader has marked
  }
}

async function look() {
  const chosen = [...runs.values()].filter((run) => run.shown);
  const wanted = new URLSearchParams(chosen.flatMap((run) => [["run", run.path], ["read", run.read ?? ""]]));
  try {
    take(await (await fetch(`data?${runs.size ? wanted : "first"}`)).json());
    $("status").textContent = `live, ${new Date().toLocaleTimeString()}`;
    draw();
  } catch (error) {
    $("status").textContent = `no news: ${error.message}`;
  }
  setTimeout(look, LOOK_EVERY);
}

$("axis").append(...Object.keys(AXES).map((name) => element("option", name)));
$("charts").append(...Object.keys(CHARTS).map((id) => element("div", "", { id })));
$("runs").onchange = ({ target }) => { runs.get(target.value).shown = target.checked; draw(); };
for (const id of ["axis", "smoothing", "log"]) $(id).oninput = draw;
dark.onchange = draw;
if ($("data").textContent) {
  take(JSON.parse($("data").textContent));
  draw();
} else look();
