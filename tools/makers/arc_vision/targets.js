// Runs inside a MiniWoB++ page. For each page type one rule says which elements its instruction means.
(() => {
  const every = (selector) => [...document.querySelectorAll(selector)];
  const labelled = (selector, text) => every(selector).filter((element) => element.innerText.trim() === text);
  const quoted = (text) => text.match(/"(.*?)"/)[1];
  const lastWord = (text) => text.match(/button (\w+)/i)[1];
  const shapeName = () => {
    const shape = document.querySelector('#area_svg *');
    const names = { rect: 'rectangle', polygon: 'triangle', circle: 'circle' };
    return names[shape.tagName.toLowerCase()] || (/\d/.test(shape.textContent) ? 'digit' : 'letter');
  };

  const targets = {
    'click-button': (text) => labelled('#area button', quoted(text)),
    'click-color': (text) => every('#area .color').filter((e) => e.dataset.color === text.match(/the (\w+) colored/)[1]),
    'click-dialog': () => every('.ui-dialog-titlebar button'),
    'click-dialog-2': (text) => quoted(text) === 'x' ? every('.ui-dialog-titlebar button')
                                                     : labelled('.ui-dialog-buttonset button', quoted(text)),
    'click-test': () => every('#area button'),
    'click-test-2': (text) => labelled('#area button', lastWord(text)),
    'click-widget': (text) => every(`#area [data-type="${quoted(text)}"]`).map((e) => e.closest('label') || e),
    'focus-text': () => every('#area input'),
    'focus-text-2': (text) => every('#area input').slice(text.match(/\d/)[0] - 1).slice(0, 1),
    'identify-shape': () => every('#area-buttons button').filter((e) => e.dataset.type === shapeName()),
  };

  // Begin the episode of a seed; returns the instruction and the boxes, in pixels, of the elements that it means.
  window.rayloopEpisode = (page, seed) => {
    Math.seedrandom(seed);
    core.EPISODE_MAX_TIME = 1e9;
    core.startEpisodeReal();
    const query = core.getUtterance ? core.getUtterance() : document.getElementById('query').textContent;
    const instruction = (query.utterance || query).replace(/\s+/g, ' ').trim();
    const boxes = targets[page](instruction).map((element) => {
      const { left, top, right, bottom } = element.getBoundingClientRect();
      return [left, top, right, bottom];
    });
    return { instruction, boxes };
  };
})();
