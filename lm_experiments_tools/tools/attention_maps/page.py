"""The parts of the page that shows attention maps, see `pages.html`."""

STYLE = """main { display: grid; grid-template-columns: minmax(14rem, 24rem) 1fr; gap: 2rem; align-items: start }
#list { max-height: 88vh; overflow: auto } .grid { display: flex; flex-wrap: wrap; gap: .4rem }
figure { margin: 0; cursor: pointer; border: 2px solid transparent; padding: 2px }
figure.on { border-color: rgb(var(--mark)) }
figcaption { font-size: 11px; color: var(--soft); text-align: center }
figure canvas { width: 72px; height: 72px; image-rendering: pixelated; display: block }
#large { image-rendering: pixelated; max-width: 100%; cursor: crosshair }
#tokens span { padding: 1px 2px; border-radius: 2px; white-space: pre-wrap; cursor: pointer }
#tokens .query { outline: 2px solid rgb(var(--mark)) }
"""

BODY = """<h1 id="title"></h1>
<main><div id="list"></div><div>
<p id="name"></p><canvas id="large"></canvas>
<p id="says" class="soft">Point at the map: rows are queries, columns are keys. Shades are square roots of weights.</p>
<p id="tokens"></p></div></main>
"""

SCRIPT = """const mark = getComputedStyle(document.documentElement).getPropertyValue("--mark").split(",").map(Number);
byId("title").textContent = data.title;
for (const map of data.maps) {
  const bytes = Uint8Array.from(atob(map.weights), c => c.charCodeAt(0));
  const view = new DataView(bytes.buffer);
  map.weights = Float32Array.from({length: bytes.length / 2}, (_, i) => view.getUint16(2 * i, true) / 65535);
  Object.assign(map, data.tokens[map.kind]);
}
function paint(canvas, map) {
  canvas.width = map.keys.length; canvas.height = map.queries.length;
  const image = new ImageData(canvas.width, canvas.height);
  map.weights.forEach((w, i) => image.data.set([...mark, 255 * Math.sqrt(w)], 4 * i));
  canvas.getContext("2d").putImageData(image, 0, 0);
}
let current, pinned = false;
function choose(map, figure) {
  document.querySelectorAll("figure.on").forEach(f => f.classList.remove("on"));
  figure.classList.add("on");
  current = map; pinned = false;
  byId("name").textContent = `${map.kind}, layer ${map.layer}, head ${map.head}`;
  paint(byId("large"), map);
  const cell = Math.max(1, Math.min(14, Math.floor(640 / Math.max(map.keys.length, map.queries.length))));
  byId("large").style.width = cell * map.keys.length + "px";
  show(0);
}
function show(query, key) {
  const width = current.keys.length, row = current.weights.subarray(query * width, (query + 1) * width);
  const top = Math.max(...row, 1e-9), same = current.kind !== "cross";
  byId("tokens").replaceChildren(...current.keys.map((token, i) => {
    const span = document.createElement("span");
    span.textContent = token + " ";
    span.title = row[i].toFixed(4);
    span.style.background = `rgba(${mark}, ${0.75 * row[i] / top})`;
    if (same && i === query) span.className = "query";
    if (same) span.onmouseenter = () => pinned || show(i);
    return span;
  }));
  byId("says").textContent = `query ${query} \\u201c${current.queries[query]}\\u201d` + (key === undefined
    ? ` attends most to \\u201c${current.keys[row.indexOf(top)] ?? ""}\\u201d: ${top.toFixed(4)}`
    : ` \\u2192 key ${key} \\u201c${current.keys[key]}\\u201d: ${row[key].toFixed(4)}`);
}
byId("large").onmousemove = event => {
  const box = event.target.getBoundingClientRect();
  const at = (x, size, count) => Math.max(0, Math.min(count - 1, Math.floor(x / size * count)));
  if (!pinned) show(at(event.clientY - box.top, box.height, current.queries.length),
                    at(event.clientX - box.left, box.width, current.keys.length));
};
byId("large").onclick = () => { pinned = !pinned; };
for (const kind of Object.keys(data.tokens)) {
  const heading = document.createElement("h2"), grid = document.createElement("div");
  heading.textContent = kind; grid.className = "grid";
  byId("list").append(heading, grid);
  for (const map of data.maps.filter(m => m.kind === kind)) {
    const figure = document.createElement("figure"), canvas = document.createElement("canvas");
    const caption = document.createElement("figcaption");
    caption.textContent = `L${map.layer} H${map.head}`;
    figure.append(canvas, caption); figure.onclick = () => choose(map, figure);
    paint(canvas, map); grid.append(figure);
    if (!current) choose(map, figure);
  }
}
"""
