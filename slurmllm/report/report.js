// Draws the figures of the page's data with plotly.js; reads nothing else, asks no network.
"use strict";

const DATA = JSON.parse(document.getElementById("report-data").textContent);
const AXES = {step: "step", tokens: "tokens", hours: "hours since the first step began"};
const MARKS = {
  restart: {name: "restarts", symbol: "diamond", size: 9, visible: true},
  save: {name: "saves", symbol: "triangle-up", size: 7, visible: "legendonly"},
  spike: {name: "spikes", symbol: "circle-open", size: 10, visible: "legendonly"},
  far: {name: "above the axis", symbol: "triangle-up", size: 10, visible: true},
};
// Plots without a step axis: their layout, and what their traces have in common.
const NATIVE = {
  scaling: {
    trace: {type: "scatter", mode: "lines+markers",
      hovertemplate: "%{x} nodes: %{y:.4g} seq/s, %{text}<extra></extra>"},
    layout: {xaxis: {title: {text: "nodes"}, type: "log", dtick: Math.log10(2)},
      yaxis: {title: {text: "sequences/s"}, type: "log"}},
  },
  utilization: {
    trace: {type: "bar", orientation: "h",
      hovertemplate: "%{fullData.name}: %{x:.2f} %, %{customdata:.4g} node hours<extra>%{y}</extra>"},
    layout: {barmode: "stack", xaxis: {title: {text: "% of the node hours"}, range: [0, 100]},
      yaxis: {autorange: "reversed", automargin: true, type: "category"}},
  },
  scores: {
    trace: {type: "scatter", mode: "lines+markers",
      hovertemplate: "%{fullData.name}: %{y:.4g} at %{x:,} tokens<extra></extra>"},
    layout: {xaxis: {title: {text: "tokens"}}, yaxis: {title: {text: "score"}}},
  },
};
const MOST_LINES = 60;  // drawn through a plot at restarts
const FEW_POINTS = 40;  // are drawn as such, on their line
const state = {x: "step", smoothing: 0,
  log: new Set(Object.keys(DATA.figures).filter((name) => DATA.figures[name].log))};
const dark = window.matchMedia("(prefers-color-scheme: dark)");
let printing = false;

// A packed array: base64 of little-endian numbers. Unpacked once.
function unpack(packed) {
  if (!packed.values) {
    const bytes = Uint8Array.from(atob(packed.b), (character) => character.charCodeAt(0));
    const kind = packed.t === "f4" ? Float32Array : Float64Array;
    packed.values = new kind(bytes.buffer);
  }
  return packed.values;
}

// TensorBoard's smoothing: an exponential mean without the bias of its begin; gaps stay gaps.
function smooth(values, weight) {
  let last = 0, seen = 0;
  return Array.from(values, (value) => {
    if (!Number.isFinite(value)) return NaN;
    last = last * weight + (1 - weight) * value;
    seen += 1;
    return last / (1 - Math.pow(weight, seen));
  });
}

function faded(color) {
  const part = (at) => parseInt(color.slice(at, at + 2), 16);
  return `rgba(${part(1)},${part(3)},${part(5)},0.28)`;
}

function line(series) {
  if (!(state.x in series.x)) return [];
  const run = DATA.runs[series.run], few = series.points || unpack(series.y).length <= FEW_POINTS;
  const named = (name) => series.name ? (DATA.runs.length > 1 ? `${name}, ${series.name}` : series.name) : name;
  const base = {
    type: "scatter", mode: few ? "lines+markers" : "lines", name: named(run.name),
    marker: {size: 5, color: run.color},
    legendgroup: `run ${series.run}`, showlegend: DATA.runs.length > 1 || "name" in series,
    connectgaps: false,
  };
  const told = (x) => ({
    x: unpack(x[state.x]), customdata: unpack(x.step),
    // A line of the box with all runs at a place: thinned curves have no values at some steps.
    hovertemplate: "%{y:.6g} at step %{customdata:,.0f}",
  });
  const shown = {...base, ...told(series.x), y: unpack(series.y), line: {color: run.color, width: 1.3, dash: series.dash}};
  if (!state.smoothing || series.points) return [shown];
  const from = series.mean || series;
  return [
    {...shown, line: {color: faded(run.color), width: 1}, hoverinfo: "skip", hovertemplate: null,
      showlegend: false},
    {...base, ...told(from.x), y: smooth(unpack(from.y), state.smoothing),
      line: {color: run.color, width: 2, dash: series.dash}},
  ];
}

// The value of a run's curve at a place, for a mark to lie on it.
function valueAt(series, x) {
  const places = unpack(series.x[state.x]), values = unpack(series.y);
  let at = 0;
  while (at < places.length - 1 && (places[at] < x || !Number.isFinite(values[at]))) at += 1;
  return values[at];
}

// Marks of one kind have one entry in the legend, whichever run they are of.
function mark(marks, figure, name) {
  const series = figure.series.find((one) => one.run === marks.run);
  if (!series || !(state.x in marks.x) || !(state.x in series.x)) return [];
  const run = DATA.runs[marks.run], look = MARKS[marks.kind], x = unpack(marks.x[state.x]);
  return [{
    type: "scatter", mode: "markers", name: look.name, legendgroup: marks.kind,
    showlegend: marks === figure.marks.find((one) => one.kind === marks.kind),
    visible: look.visible, x: x,
    y: Array.from(x, (place) => marks.kind === "far" && !state.log.has(name)
      ? 0.97 * figure.top : valueAt(series, place)),
    text: marks.text, hovertemplate: "%{text}",
    marker: {symbol: look.symbol, size: look.size, color: run.color, line: {width: 1}},
  }];
}

function restartLines(figure) {
  const found = [];
  for (const marks of figure.marks) {
    if (marks.kind !== "restart" || !(state.x in marks.x)) continue;
    for (const x of Array.from(unpack(marks.x[state.x])).slice(-MOST_LINES)) {
      found.push({
        type: "line", xref: "x", yref: "paper", x0: x, x1: x, y0: 0, y1: 1, layer: "below",
        line: {color: faded(DATA.runs[marks.run].color), width: 1.5, dash: "dot"},
      });
    }
  }
  return found;
}

function limitLine(figure) {
  const line = {color: "#8a8f94", width: 1.5, dash: "dash"};
  return figure.limit ? [{type: "line", xref: "paper", yref: "y", x0: 0, x1: 1,
    y0: figure.limit, y1: figure.limit, layer: "below", line: line}] : [];
}

// The range of a linear y axis: without outliers, or around a constant, which plotly draws as 0.
function range(name, figure, arrays) {
  if (state.log.has(name)) return {type: "log", tickformat: "~g"};
  if (figure.top) return {type: "linear", range: [0, figure.top]};
  let low = Infinity, high = -Infinity;
  for (const values of arrays) {
    for (const value of values) {
      if (value < low) low = value;
      if (value > high) high = value;
    }
  }
  const constant = low <= high && high - low <= 1e-6 * Math.abs(high);
  if (!constant || high === 0) return {type: "linear"};
  return {type: "linear", range: high > 0 ? [0, 2 * high] : [2 * high, 0]};
}

function curve(name, figure) {
  const lines = figure.series.flatMap((series) => line(series));
  const marks = figure.marks.flatMap((one) => mark(one, figure, name));
  return {
    data: [...lines, ...marks],
    layout: {
      xaxis: {title: {text: AXES[state.x]}},
      yaxis: {title: {text: figure.unit || figure.title},
        ...range(name, figure, lines.map((one) => one.y))},
      shapes: [...restartLines(figure), ...limitLine(figure)], hovermode: "x unified", height: figure.height,
    },
  };
}

function stack(name, figure) {
  const x = figure.x[state.x] || figure.x.step;
  const data = figure.layers.map((layer) => ({
    type: "scatter", mode: "lines", stackgroup: "parts", name: layer.name, x: unpack(x),
    y: state.smoothing ? smooth(unpack(layer.y), state.smoothing) : unpack(layer.y),
    line: {width: 0}, fillcolor: layer.color, hovertemplate: "%{y:.4g} s",
  }));
  return {
    data: data,
    layout: {
      xaxis: {title: {text: AXES[state.x in figure.x ? state.x : "step"]}},
      yaxis: {title: {text: "s"}, ...range(name, figure, [])},
      hovermode: "x unified",
    },
  };
}

function native(name, figure) {
  const {trace, layout} = NATIVE[figure.kind];
  return {
    data: figure.data.map((own) => ({...trace, ...own})),
    layout: {...layout, height: figure.height},
  };
}

function themed(layout, traces, width) {
  const night = dark.matches && !printing;
  const text = night ? "#d7dde2" : "#20272d", grid = night ? "#3a444d" : "#e1e5e8";
  // Plain numbers with commas, such as 143,000 and 0.0003; tokens as 1.5B.
  const axis = {gridcolor: grid, zerolinecolor: grid, linecolor: grid, automargin: true,
    tickformat: ",.9~g"};
  const tokens = layout.xaxis.title.text === "tokens" ? {tickformat: "", exponentformat: "B"} : {};
  // On a phone the legend is a list below the plot, which grows by it.
  const narrow = width < 480, entries = traces.filter((one) => one.showlegend !== false).length;
  return {
    ...layout,
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: {family: "system-ui, sans-serif", size: 12, color: text},
    // Above the legend are plotly's buttons.
    margin: {l: narrow ? 48 : 64, r: 16, t: narrow ? 10 : entries > 1 ? 56 : 34, b: 44},
    height: (layout.height || 320) + (narrow ? 20 * entries : 0),
    legend: narrow
      ? {orientation: "v", y: -0.2, yanchor: "top", x: 0, font: {size: 11}, traceorder: "normal"}
      : {orientation: "h", y: 1.02, yanchor: "bottom", x: 0, traceorder: "normal"},
    modebar: {bgcolor: "rgba(0,0,0,0)", color: grid, activecolor: text},
    hoverlabel: {align: "left", bgcolor: night ? "#20272d" : "#ffffff", font: {color: text}},
    xaxis: {...axis, ...tokens, ...layout.xaxis}, yaxis: {...axis, ...layout.yaxis}, uirevision: state.x,
  };
}

function draw(name) {
  const figure = DATA.figures[name], place = document.getElementById(`plot-${name}`);
  const made = figure.kind === "curve" ? curve(name, figure)
    : figure.kind === "stack" ? stack(name, figure) : native(name, figure);
  return Plotly.react(place, made.data, themed(made.layout, made.data, place.clientWidth), {
    responsive: true, displaylogo: false, scrollZoom: false,
    showSendToCloud: false, plotlyServerURL: "",  // nothing leaves the page
    modeBarButtonsToRemove: ["select2d", "lasso2d"],
    toImageButtonOptions: {filename: name, scale: 2},
  }).then(() => { place.dataset.traces = String(made.data.length); });
}

function drawAll() {
  const every = Object.keys(DATA.figures).filter((name) => document.getElementById(`plot-${name}`));
  return Promise.all(every.map(draw)).then(() => { document.body.dataset.drawn = String(every.length); });
}

for (const input of document.querySelectorAll("input[name=axis]")) {
  input.addEventListener("change", () => { state.x = input.value; drawAll(); });
}
document.getElementById("smoothing")?.addEventListener("input", (event) => {
  state.smoothing = Number(event.target.value);
  document.getElementById("smoothing-value").textContent = state.smoothing.toFixed(2);
  drawAll();
});
for (const button of document.querySelectorAll("button[data-log]")) {
  button.addEventListener("click", () => {
    const name = button.dataset.log, on = !state.log.has(name);
    if (on) state.log.add(name); else state.log.delete(name);
    button.setAttribute("aria-pressed", String(on));
    draw(name);
  });
}
dark.addEventListener("change", drawAll);
window.addEventListener("beforeprint", () => { printing = true; drawAll(); });
window.addEventListener("afterprint", () => { printing = false; drawAll(); });
drawAll();
