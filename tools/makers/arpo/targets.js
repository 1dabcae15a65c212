// Inside a MiniWoB++ page: the box, in pixels, of the element that its instruction means next; null when there is not exactly one.
(() => {
  if (WOB_DONE_GLOBAL) return null;
  const every = (selector) => [...document.querySelectorAll(selector)];
  const labelled = (selector, text) => every(selector).filter((element) => element.innerText.trim() === text);
  const quoted = (text) => text.match(/"(.*?)"/)[1];
  const targets = {
    'click-button': (text) => labelled('#area button', quoted(text)),
    'click-button-sequence': () => every(buttonsPushed.length ? '#subbtn2' : '#subbtn'),
    'click-collapsible': () => every(document.querySelector('.ui-accordion-content-active') ? '#subbtn' : '#area h3'),
    'click-color': (text) => every('#area .color').filter((e) => e.dataset.color === text.match(/the (\w+) colored/)[1]),
    'click-dialog': () => every('.ui-dialog-titlebar button'),
    'click-dialog-2': (text) => quoted(text) === 'x' ? every('.ui-dialog-titlebar button')
                                                     : labelled('.ui-dialog-buttonset button', quoted(text)),
    'click-tab': (text) => labelled('#area ul a', text.match(/Tab #\d/)[0]),
    'click-test': () => every('#area button'),
    'click-test-2': (text) => labelled('#area button', text.match(/button (\w+)/i)[1]),
    'click-widget': (text) => every(`#area [data-type="${quoted(text)}"]`).map((e) => e.closest('label') || e),
    'focus-text': () => every('#area input'),
    'focus-text-2': (text) => every('#area input').slice(text.match(/\d/)[0] - 1).slice(0, 1),
  };
  const page = location.pathname.split('/').pop().replace('.html', '');
  const query = core.getUtterance ? core.getUtterance() : document.getElementById('query').textContent;
  const found = targets[page]((query.utterance || query).replace(/\s+/g, ' ').trim());
  if (found.length !== 1) return null;
  const { left, top, right, bottom } = found[0].getBoundingClientRect();
  return [left, top, right, bottom];
})()
