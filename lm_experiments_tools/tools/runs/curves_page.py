"""The parts of the page of curves, see `pages.html`: an SVG drawn by a script, tables, sentences."""

STYLE = """body { max-width: 84rem; margin: 1.5rem auto; padding: 0 1.5rem }
header { display: flex; align-items: baseline; gap: 1rem }
#controls { display: flex; flex-wrap: wrap; gap: .5rem 1.4rem; align-items: center; margin: .8rem 0 }
#controls label { display: flex; gap: .35rem; align-items: center }
select, button { font: inherit; color: inherit; background: var(--paper); border: 1px solid var(--line);
  border-radius: 5px; padding: .15rem .5rem; cursor: pointer }
.choice { display: flex } .choice button { border-radius: 0; margin-left: -1px }
.choice button:first-child { border-radius: 5px 0 0 5px } .choice button:last-child { border-radius: 0 5px 5px 0 }
.choice .on { background: rgb(var(--mark)); color: var(--paper) }
#plot { display: grid; grid-template-columns: 1fr 15rem; gap: 1.2rem; align-items: start }
@media (max-width: 60rem) { #plot { grid-template-columns: 1fr } }
#chart { position: relative } svg { display: block; width: 100%; font: 11px system-ui, sans-serif; fill: var(--soft) }
#chart svg { cursor: crosshair; touch-action: none }
.grid-line { stroke: var(--line) } .curve { fill: none; stroke-width: 1.8; stroke-linejoin: round }
#tip { position: absolute; pointer-events: none; background: var(--paper); border: 1px solid var(--line);
  border-radius: 6px; padding: .4rem .6rem; font-size: 12px; box-shadow: 0 2px 8px #0003; white-space: nowrap }
#tip table { border-collapse: collapse } #tip td { padding: 0 .3rem; border: 0 } #tip .number { text-align: right }
#legend div { display: flex; gap: .45rem; align-items: center; padding: .12rem .3rem; cursor: pointer;
  border-radius: 4px; user-select: none } #legend div:hover { background: var(--line) }
#legend .off { opacity: .35 } #legend .value { margin-left: auto; font-variant-numeric: tabular-nums }
#legend .name { overflow-wrap: anywhere; line-height: 1.25 }
.swatch { width: .8rem; height: .8rem; border-radius: 3px; flex: none; display: inline-block }
#small { display: grid; grid-template-columns: repeat(auto-fill, minmax(13rem, 1fr)); gap: .8rem; margin-top: 1rem }
#small figure { margin: 0; border: 1px solid var(--line); border-radius: 6px; padding: .4rem; cursor: pointer }
#small figure.on { border-color: rgb(var(--mark)) } #small figcaption { font-size: 12px; color: var(--soft) }
.wide { overflow-x: auto } table.data { border-collapse: collapse; font-variant-numeric: tabular-nums }
.data th { text-align: left; color: var(--soft); font-weight: 600 }
.data th, .data td { padding: .2rem .9rem .2rem 0; border-bottom: 1px solid var(--line); vertical-align: top }
.data .number { text-align: right } .data td { max-width: 26rem; overflow-wrap: anywhere }
.data .swatch { margin-right: .4rem; vertical-align: -1px }
"""

BODY = """<header><h1>Runs</h1><span id="made" class="soft"></span></header>
<div id="controls">
<label>curve <select id="metric"></select></label>
<span class="choice" id="axis"></span><span id="splits" class="choice"></span>
<label>smoothing <input type="range" id="smooth" min="0" max="20" step="0.5" value="2.5"></label>
<label><input type="checkbox" id="logy"> log y</label><label><input type="checkbox" id="logx"> log x</label>
<label title="also the first values, far above the rest"><input type="checkbox" id="whole"> outliers</label>
<button id="reset" hidden>whole curve</button></div>
<div id="plot"><div id="chart"></div><div id="legend"></div></div>
<p class="soft">Drag over the curves to look closer; click a name to hide its run, with Shift to see it alone.</p>
<div id="small"></div><div id="tables"></div><div id="problems"></div>
"""

SCRIPT = r"""const COLOURS = ["#4269d0", "#e68a00", "#e5484d", "#2a9d8f", "#a463f2", "#d6409f", "#3ca951", "#9c6b4e",
  "#5bb0e8", "#8b8f98"];
const colour = i => i < COLOURS.length ? COLOURS[i] : `hsl(${(i * 137.5) % 360} 60% 52%)`;
const AXES = {step: "steps", samples: "samples", tokens: "tokens", seconds: "time"};
const state = {metric: "", axis: "step", hidden: new Set(), splits: new Set(), smooth: 2.5, logy: false, logx: false,
  whole: false, zoom: null};
function make(tag, parent, attributes = {}, text) {
  const svg = ["svg", "path", "line", "text", "g", "circle", "rect", "clipPath"].includes(tag);
  const node = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  if (text !== undefined) node.textContent = text;
  if (parent) parent.append(node);
  return node;
}
function short(value) {
  const size = Math.abs(value);
  if (size >= 1e4) for (const [unit, factor] of [["T", 1e12], ["B", 1e9], ["M", 1e6], ["k", 1e3]])
    if (size >= factor) return +(value / factor).toPrecision(4) + unit;
  return size && size < 1e-3 ? value.toExponential(2) : String(+value.toPrecision(4));
}
function duration(s) {
  if (s < 60) return +s.toPrecision(3) + " s";
  const h = Math.floor(s / 3600), m = Math.floor(s / 60) % 60, two = n => String(n).padStart(2, "0");
  return h ? `${h} h ${two(m)} min` : `${m} min ${two(Math.floor(s % 60))} s`;
}
const shownX = value => state.axis === "seconds" ? duration(value) : Math.round(value).toLocaleString("en");
function ticks(low, high, log, count) {
  if (log && high / low > 8) {
    const found = [], steps = Math.log10(high / low) > 3 ? [1] : [1, 2, 5];
    for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power++)
      for (const step of steps) found.push(step * 10 ** power);
    return found.filter(tick => tick >= low && tick <= high);
  }
  const rough = (high - low) / count, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map(factor => factor * power).find(size => size >= rough);
  const found = [];
  for (let i = Math.ceil(low / step); i * step <= high + step * 1e-9; i++) found.push(+(i * step).toPrecision(12));
  return found;
}
function smoothed(values) {  // the mean over neighbours, as many before as after, so that it does not lag
  const half = Math.round(values.length * state.smooth / 200);
  if (values.length <= 40 || !half) return values;
  const sums = [0], counts = [0];
  values.forEach((v, i) => { sums.push(sums[i] + (v ?? 0)); counts.push(counts[i] + (v !== null)); });
  return values.map((v, i) => {
    const reach = Math.min(half, i, values.length - 1 - i), a = i - reach, b = i + reach + 1;
    return v === null ? null : (sums[b] - sums[a]) / (counts[b] - counts[a]);
  });
}
function curves(metric) {  // what is to be seen: one entry a run and split
  const found = [];
  data.runs.forEach((run, i) => Object.entries(run.splits).forEach(([split, part]) => {
    const curve = part.curves[metric], x = part.x[state.axis];
    if (!curve || state.hidden.has(i) || !state.splits.has(split)) return;
    const fits = k => x[k] !== null && curve.mean[k] !== null
      && (!state.logx || x[k] > 0) && (!state.logy || curve.mean[k] > 0);
    const keep = x.map((_, k) => k).filter(fits), take = list => keep.map(k => list[k]);
    if (!keep.length) return;
    const entry = {run: i, name: run.name, split, x: take(x), mean: take(curve.mean)};
    if (curve.low) Object.assign(entry, {low: take(curve.low), high: take(curve.high)});
    entry.shown = smoothed(entry.mean);
    found.push(entry);
  }));
  return found;
}
function range(found, zoom) {
  let x0 = Infinity, x1 = -Infinity;
  for (const c of found) { x0 = Math.min(x0, c.x[0]); x1 = Math.max(x1, c.x[c.x.length - 1]); }
  if (zoom) [x0, x1] = zoom;
  const all = found.flatMap(c => c.mean.filter((_, k) => c.x[k] >= x0 && c.x[k] <= x1)).sort((a, b) => a - b);
  let low = all[0] ?? 0, high = all[all.length - 1] ?? 1;
  const at = q => all[Math.floor(q * (all.length - 1))];
  if (!state.whole && !state.logy && all.length > 40) {  // a first loss far above the rest does not flatten the curve
    if (high - low > 4 * Math.max(at(.97) - low, 1e-9)) high = low + 1.5 * (at(.97) - low);
    else if (high - low > 4 * Math.max(high - at(.03), 1e-9)) low = high - 1.5 * (high - at(.03));
  }
  if (state.logy) { const room = Math.max((high / low) ** .05, 1.01); low /= room; high *= room; }
  else { const room = .05 * (high - low) || .05 * Math.abs(high) || .1; low -= room; high += room; }
  if (x0 === x1) { x0 -= state.logx ? x0 / 10 : .5; x1 += x1 / 10 || .5; }
  return {x0, x1, low, high};
}
function scales(r, box) {
  const map = (a, b, log, from, to) => log ? v => from + (to - from) * Math.log(v / a) / Math.log(b / a)
    : v => from + (to - from) * (v - a) / (b - a);
  return {x: map(r.x0, r.x1, state.logx, box.left, box.right), y: map(r.low, r.high, state.logy, box.bottom, box.top)};
}
const path = (xs, ys, s) => xs.map((x, k) => `${k ? "L" : "M"}${s.x(x).toFixed(1)} ${s.y(ys[k]).toFixed(1)}`).join("");
function paint(svg, found, s, small) {
  for (const c of found) {
    const ink = colour(c.run), fades = c.shown !== c.mean;
    const dashed = state.splits.size > 1 && c.split !== "train" ? {"stroke-dasharray": small ? "3 2" : "6 3"} : {};
    const positive = !state.logy || c.low?.every(v => v > 0);
    const back = () => path(c.x.toReversed(), c.low.toReversed(), s).replace("M", "L");
    if (c.low && positive && !small)
      make("path", svg, {d: path(c.x, c.high, s) + back() + "Z", fill: ink, opacity: .16});
    else if (fades && !small) make("path", svg, {class: "curve", d: path(c.x, c.mean, s), stroke: ink, opacity: .28,
      style: "stroke-width:1"});
    make("path", svg, {class: "curve", d: path(c.x, c.shown, s), stroke: ink, ...dashed});
    if (c.x.length <= 40 && !small)
      c.x.forEach((x, k) => make("circle", svg, {cx: s.x(x), cy: s.y(c.mean[k]), r: 2.6, fill: ink}));
  }
}
function timeUnit(r) { return r.x1 > 7200 ? ["hours", 3600] : r.x1 > 180 ? ["minutes", 60] : ["seconds", 1]; }
function draw() {
  const chart = byId("chart"), width = Math.max(chart.clientWidth, 320), height = 420;
  chart.replaceChildren();
  const svg = make("svg", chart, {viewBox: `0 0 ${width} ${height}`, height, role: "img"});
  const found = curves(state.metric);
  legend(found);
  if (!found.length) {
    make("text", svg, {x: 20, y: 40}, "No run that is shown has this curve over this axis.");
    return;
  }
  const box = {left: 56, right: width - 22, top: 10, bottom: height - 36}, r = range(found, state.zoom);
  const s = scales(r, box), [unit, factor] = state.axis === "seconds" ? timeUnit(r) : ["", 1];
  for (const tick of ticks(r.low, r.high, state.logy, 6)) {
    make("line", svg, {class: "grid-line", x1: box.left, x2: box.right, y1: s.y(tick), y2: s.y(tick)});
    make("text", svg, {x: box.left - 7, y: s.y(tick) + 4, "text-anchor": "end"}, short(tick));
  }
  for (const tick of ticks(r.x0 / factor, r.x1 / factor, state.logx, Math.min(8, width / 90)))
    make("text", svg, {x: s.x(tick * factor), y: box.bottom + 16, "text-anchor": "middle"}, short(tick));
  const says = {step: "optimizer updates", samples: "samples", tokens: "tokens", seconds: `${unit} of training`};
  make("text", svg, {x: (box.left + box.right) / 2, y: height - 4, "text-anchor": "middle"}, says[state.axis]);
  make("rect", make("clipPath", svg, {id: "inside"}), {x: box.left, y: box.top, width: box.right - box.left,
    height: box.bottom - box.top});
  paint(make("g", svg, {"clip-path": "url(#inside)"}), found, s, false);
  point(chart, svg, found, s, r, box, width);
}
function nearest(xs, x) {
  let low = 0, high = xs.length - 1;
  while (high - low > 1) { const middle = (low + high) >> 1; if (xs[middle] < x) low = middle; else high = middle; }
  return Math.abs(xs[low] - x) <= Math.abs(xs[high] - x) ? low : high;
}
function point(chart, svg, found, s, r, box, width) {
  const tip = make("div", chart, {id: "tip", hidden: ""}), marks = make("g", svg);
  let from = null;
  const pixel = event => {
    const frame = svg.getBoundingClientRect();
    return Math.max(box.left, Math.min(box.right, (event.clientX - frame.left) / frame.width * width));
  };
  const value = at => {
    const part = (at - box.left) / (box.right - box.left);
    return state.logx ? r.x0 * (r.x1 / r.x0) ** part : r.x0 + part * (r.x1 - r.x0);
  };
  svg.onpointermove = event => {
    const at = pixel(event), x = value(at);
    marks.replaceChildren(); tip.replaceChildren();
    make("line", marks, {x1: at, x2: at, y1: box.top, y2: box.bottom, stroke: "currentColor", opacity: .35});
    if (from !== null) make("rect", marks, {x: Math.min(from, at), y: box.top, width: Math.abs(at - from),
      height: box.bottom - box.top, fill: "rgb(var(--mark))", opacity: .18});
    const table = make("table", tip), rows = found.map(c => ({c, k: nearest(c.x, x)}))
      .sort((a, b) => b.c.shown[b.k] - a.c.shown[a.k]);
    for (const {c, k} of rows.slice(0, 24)) {
      const row = make("tr", table);
      make("span", make("td", row), {class: "swatch", style: `background:${colour(c.run)}`});
      make("td", row, {}, c.name);
      make("td", row, {class: "soft"}, c.split);
      make("td", row, {class: "number"}, short(c.shown[k]));
      make("td", row, {class: "number soft"}, shownX(c.x[k]));
      const y = s.y(c.shown[k]);
      if (y >= box.top && y <= box.bottom) make("circle", marks, {cx: s.x(c.x[k]), cy: y, r: 4,
        fill: colour(c.run), stroke: "var(--paper)"});
    }
    tip.hidden = false;
    tip.style.top = "18px";
    tip.style.left = (at > width / 2 ? at - tip.offsetWidth - 14 : at + 14) * svg.clientWidth / width + "px";
  };
  svg.onpointerleave = () => { tip.hidden = true; if (from === null) marks.replaceChildren(); };
  svg.onpointerdown = event => { from = pixel(event); svg.setPointerCapture(event.pointerId); };
  svg.onpointerup = event => {
    const to = pixel(event), start = from;
    from = null;
    if (start === null || Math.abs(to - start) < 8) { marks.replaceChildren(); return; }
    state.zoom = [value(Math.min(start, to)), value(Math.max(start, to))];
    byId("reset").hidden = false;
    draw();
  };
}
function legend(found) {
  const box = byId("legend");
  box.replaceChildren();
  data.runs.forEach((run, i) => {
    const row = make("div", box, {title: `${run.name} (${run.state})`, class: state.hidden.has(i) ? "off" : ""});
    make("span", row, {class: "swatch", style: `background:${colour(i)}`});
    make("span", row, {class: "name"}, run.name);
    const own = found.filter(c => c.run === i), last = own.find(c => c.split !== "train") ?? own[0];
    make("span", row, {class: "value soft", title: last ? `last value, ${last.split}` : ""},
      last ? short(last.mean[last.mean.length - 1]) : "");
    row.onclick = event => {
      const others = data.runs.map((_, k) => k).filter(k => k !== i);
      if (event.shiftKey) state.hidden = new Set(others.every(k => state.hidden.has(k)) ? [] : others);
      else if (!state.hidden.delete(i)) state.hidden.add(i);
      refresh();
    };
  });
}
function smallCharts() {
  byId("small").replaceChildren();
  for (const metric of metrics) {
    const figure = make("figure", byId("small"), {class: metric === state.metric ? "on" : ""});
    make("figcaption", figure, {}, metric);
    const svg = make("svg", figure, {viewBox: "0 0 200 90"}), found = curves(metric);
    if (found.length) paint(svg, found, scales(range(found), {left: 2, right: 198, top: 3, bottom: 87}), true);
    figure.onclick = () => { byId("metric").value = state.metric = metric; refresh(); };
  }
}
function refresh() { draw(); smallCharts(); }
function buttons(id, names, isOn, press) {
  byId(id).replaceChildren();
  for (const [name, text] of names) make("button", byId(id), {class: isOn(name) ? "on" : ""}, text).onclick = () => {
    press(name); buttons(id, names, isOn, press); refresh();
  };
}
const parts = data.runs.flatMap(run => Object.entries(run.splits));
const order = (list, first) => list.sort((a, b) => (first.indexOf(b) >= 0) - (first.indexOf(a) >= 0)
  || (first.indexOf(a) - first.indexOf(b)));
const splits = order([...new Set(parts.map(([name]) => name))], ["train", "valid"]);
const metrics = [...new Set(parts.flatMap(([, part]) => Object.keys(part.curves)))];
order(metrics, ["loss", ...data.measured]);
state.metric = metrics[0] ?? "";
state.splits = new Set(splits);
byId("made").textContent = data.made;
for (const metric of metrics) make("option", byId("metric"), {}, metric);
byId("metric").onchange = event => { state.metric = event.target.value; refresh(); };
buttons("axis", Object.entries(AXES), name => name === state.axis, name => {
  state.axis = name; state.zoom = null; byId("reset").hidden = true;
});
const wording = name => [name, name === "valid" ? "validation" : name];
buttons("splits", splits.map(wording), name => state.splits.has(name), name => {
  if (!state.splits.delete(name)) state.splits.add(name);
});
for (const id of ["logy", "logx", "whole"]) byId(id).onchange = event => {
  state[id] = event.target.checked; refresh();
};
byId("smooth").oninput = event => { state.smooth = +event.target.value; refresh(); };
byId("reset").onclick = () => { state.zoom = null; byId("reset").hidden = true; refresh(); };
for (const table of data.tables) {
  make("h2", byId("tables"), {}, table.title);
  const box = make("table", make("div", byId("tables"), {class: "wide"}), {class: "data"});
  const columns = [...new Set(table.rows.flatMap(row => Object.keys(row)))], head = make("tr", box);
  const texts = table.title.startsWith("settings") ? columns : ["run", "state"];
  const swatch = (cell, name) => {
    const i = data.runs.findIndex(run => run.name === name);
    if (i >= 0) make("span", cell, {class: "swatch", style: `background:${colour(i)}`});
  };
  for (const name of columns) {
    const cell = make("th", head, texts.includes(name) ? {} : {class: "number"});
    swatch(cell, name);
    cell.append(name);
  }
  for (const row of table.rows) {
    const line = make("tr", box);
    for (const name of columns) {
      const cell = make("td", line, texts.includes(name) ? {} : {class: "number"});
      if (name === "run") swatch(cell, row.run);
      cell.append(row[name] ?? "-");
    }
  }
}
if (data.problems.length) make("h2", byId("problems"), {}, "what could not be read");
for (const problem of data.problems) make("p", byId("problems"), {}, problem);
window.onresize = draw;
refresh();
"""
