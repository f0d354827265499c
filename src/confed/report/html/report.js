// What a page can do more where scripts run: sort tables, show values on curves, save figures, change between light and
// dark. Without scripts everything can be read. Nothing is loaded; texts are set as text, never as markup.
"use strict";

const make = (tag, name, text = "") => Object.assign(document.createElement(tag), { className: name, textContent: text });

// Tables: a click on a heading sorts within each part of the table; the third click restores the order.
const keyOf = (row, column) => {
  const cell = row.cells[column];
  return cell.dataset.v === undefined ? cell.textContent.trim() : Number(cell.dataset.v);
};
const compare = (a, b, numbers) => {
  if (!numbers) return String(a).localeCompare(String(b), undefined, { numeric: true });
  return a - b;
};
for (const table of document.querySelectorAll("table")) {
  const head = table.tHead?.rows[table.tHead.rows.length - 1];
  const bodies = [...table.tBodies].map((body) => [body, [...body.rows]]);
  const plain = bodies.every(([, rows]) => rows.every((row) => row.cells.length === head?.cells.length));
  if (!head || !plain || !bodies.some(([, rows]) => rows.length > 1)) continue;
  [...head.cells].forEach((heading, column) => {
    const button = make("button", "sort");
    button.type = "button";
    button.append(...heading.childNodes);
    heading.append(button);
    const numbers = bodies.some(([, rows]) => rows.some((row) => row.cells[column].dataset.v !== undefined));
    button.addEventListener("click", () => {
      const first = numbers ? "descending" : "ascending";
      const states = ["none", first, first === "ascending" ? "descending" : "ascending"];
      const next = states[(states.indexOf(heading.ariaSort ?? "none") + 1) % 3];
      for (const other of head.cells) other.ariaSort = null;
      heading.ariaSort = next;
      for (const [body, rows] of bodies) {
        const known = (row) => !numbers || typeof keyOf(row, column) === "number";
        const sign = next === "ascending" ? 1 : -1;
        const sorted = rows.filter(known).sort((a, b) => sign * compare(keyOf(a, column), keyOf(b, column), numbers));
        body.append(...(next === "none" ? rows : [...sorted, ...rows.filter((row) => !known(row))]));
      }
    });
  });
}

// Figures: values where the pointer is.
const SVG = "http://www.w3.org/2000/svg";
const tip = make("div", "tip");
tip.hidden = true;
document.body.append(tip);
const shown = (value) => (typeof value === "number" ? String(Number(value.toPrecision(4))) : value);

function nearest(panels, at) {
  const inside = ({ box: [x, y, w, h] }) => at.x > x - 8 && at.x < x + w + 8 && at.y > y - 8 && at.y < y + h + 8;
  const panel = panels.find(inside);
  if (!panel) return null;
  let best = null;
  for (const [, , points] of panel.series)
    for (const point of points) {
      const far = Math.hypot(point[2] - at.x, 0.3 * (point[3] - at.y));
      if (!best || far < best.far) best = { far, point };
    }
  return best && best.far < 60 ? { panel, point: best.point } : null;
}

function tell(panel, [x, y]) {
  // All series that have a value there, from the highest to the lowest.
  const numbers = typeof y === "number";
  const lines = panel.series.flatMap(([label, colour, points]) =>
    points.filter((p) => p[0] === x || !numbers).map((p) => [label, colour, p]),
  );
  const value = numbers ? 1 : 0; // rows with names have their values on the horizontal axis
  lines.sort((a, b) => b[2][value] - a[2][value]);
  const title = [panel.title || panel.y, numbers ? `${panel.x} ${shown(x)}`.trim() : panel.x].filter(Boolean).join(", ");
  tip.replaceChildren(make("b", "", title));
  for (const [label, colour, point] of lines) {
    const line = make("div", "");
    const mark = make("i", "");
    mark.style.background = colour;
    line.append(mark, make("span", "", label), make("em", "", shown(point[value])));
    tip.append(line);
  }
}

function follow(svg, panels) {
  const guide = document.createElementNS(SVG, "line");
  guide.setAttribute("class", "guide");
  const hide = () => {
    tip.hidden = true;
    guide.remove();
  };
  const show = (event) => {
    const at = new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse());
    const found = nearest(panels, at);
    if (!found) return hide();
    const { panel, point } = found;
    const [, top, , height] = panel.box;
    Object.entries({ x1: point[2], x2: point[2], y1: top, y2: top + height }).forEach(([k, v]) => guide.setAttribute(k, v));
    svg.append(guide);
    tell(panel, point);
    tip.hidden = false;
    const { width, height: tall } = tip.getBoundingClientRect();
    const right = event.clientX + 16 + width < innerWidth;
    tip.style.left = `${Math.max(4, right ? event.clientX + 16 : event.clientX - width - 16)}px`;
    tip.style.top = `${Math.max(4, Math.min(event.clientY + 12, innerHeight - tall - 8))}px`;
  };
  svg.addEventListener("pointermove", show);
  svg.addEventListener("pointerdown", show);
  // A finger leaves at once: what it touched stays until it touches something else.
  svg.addEventListener("pointerleave", (event) => event.pointerType === "mouse" && hide());
  addEventListener("pointerdown", (event) => svg.contains(event.target) || hide(), true);
  addEventListener("scroll", hide, { passive: true });
}

// Figures: saved in the light colours, on white.
function save(name, kind, content) {
  const link = make("a", "");
  link.href = URL.createObjectURL(content);
  link.download = `${name.replace(/[^\p{L}\p{N}_-]+/gu, "-")}.${kind}`;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}

function drawing(svg, panels) {
  const probe = make("span", "");
  probe.style.colorScheme = "light";
  document.body.append(probe);
  const light = (colour) => {
    probe.style.color = colour;
    return getComputedStyle(probe).color;
  };
  const copy = svg.cloneNode(true);
  copy.querySelectorAll(".guide").forEach((line) => line.remove());
  delete copy.dataset.panels;
  const view = svg.viewBox.baseVal;
  const words = [...copy.querySelectorAll("text")].map((text) => text.textContent);
  const series = new Map(panels.flatMap((panel) => panel.series.map(([label, colour]) => [label, colour])));
  const add = (tag, attributes, text = "") => {
    const part = Object.assign(document.createElementNS(SVG, tag), { textContent: text });
    Object.entries(attributes).forEach(([key, value]) => part.setAttribute(key, value));
    return part;
  };
  // A legend that stands beside the figure on the page goes into the file.
  const missing = [...series].some(([label]) => !words.some((word) => word.startsWith(label)));
  const above = missing ? 20 : 0;
  let left = 10;
  for (const [label, colour] of missing ? series : []) {
    copy.append(add("rect", { x: left, y: -13, width: 14, height: 4, fill: colour }));
    copy.append(add("text", { x: left + 18, y: -8, fill: "var(--ink)", style: "font: 9px sans-serif" }, label));
    left += 32 + 5 * label.length;
  }
  const size = { x: 0, y: -above, width: view.width, height: view.height + above };
  copy.setAttribute("viewBox", Object.values(size).join(" "));
  copy.setAttribute("width", (size.width * 96) / 72);
  copy.setAttribute("height", (size.height * 96) / 72);
  copy.prepend(add("rect", { ...size, fill: "#ffffff" }));
  const text = new XMLSerializer().serializeToString(copy).replace(/var\(--[\w-]+\)/g, light);
  probe.remove();
  return { text, width: size.width, height: size.height };
}

function picture({ text, width, height }) {
  return new Promise((done, failed) => {
    const image = new Image();
    image.onload = () => {
      const canvas = document.createElement("canvas");
      const scale = (2 * 96) / 72;
      [canvas.width, canvas.height] = [width * scale, height * scale];
      canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
      canvas.toBlob(done, "image/png");
    };
    image.onerror = failed;
    image.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(text)}`;
  });
}

function table(panels) {
  // A name of a client or a place must be no formula of a spreadsheet; numbers stay numbers.
  const plain = (value) =>
    typeof value === "string" && /^[=+\-@\t\r]/.test(value) && Number.isNaN(Number(value)) ? `'${value}` : value;
  const escaped = (value) => (/[",\n\r]/.test(value) ? `"${String(value).replaceAll('"', '""')}"` : value);
  const quoted = (value) => escaped(plain(value));
  const rows = panels.flatMap(({ title, x, y, series }) =>
    series.flatMap(([label, , points]) => points.map((point) => [title, label, x, point[0], y, point[1]])),
  );
  return [["panel", "series", "x axis", "x", "y axis", "y"], ...rows].map((row) => row.map(quoted).join(",")).join("\n");
}

for (const svg of document.querySelectorAll("figure > svg[data-name]")) {
  const panels = JSON.parse(svg.dataset.panels);
  if (panels.length) follow(svg, panels);
  const name = svg.dataset.name;
  const kinds = {
    SVG: () => save(name, "svg", new Blob([drawing(svg, panels).text], { type: "image/svg+xml" })),
    PNG: async () => save(name, "png", await picture(drawing(svg, panels))),
    CSV: () => save(name, "csv", new Blob([table(panels) + "\n"], { type: "text/csv" })),
  };
  if (!panels.length) delete kinds.CSV;
  const bar = make("div", "save", "Save as");
  for (const [kind, action] of Object.entries(kinds)) {
    const button = make("button", "", kind);
    button.type = "button";
    button.addEventListener("click", action);
    bar.append(button);
  }
  svg.after(bar);
}

// Light or dark, whatever the system's setting.
const scheme = make("button", "scheme", "Light or dark");
scheme.type = "button";
scheme.addEventListener("click", () => {
  const root = document.documentElement;
  const now = root.style.colorScheme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
  root.style.colorScheme = now === "dark" ? "light" : "dark";
});
document.querySelector("nav")?.append(scheme);
