"""The lab's vocabulary: things, colors, actions and scenes that captions mention, as data.

A thing is *mentioned* by any of its words, and *hidden* by words that make its absence doubtful: a caption about a
forest says nothing about birds, but a caption about skiing does not imply that there is no snow.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_SPLIT = re.compile(r"[a-z]+")

BOY = "boy boys son brother"
GIRL = "girl girls daughter sister schoolgirl schoolgirls ballerina cheerleader cheerleaders"
MAN = "man men guy guys male males gentleman gentlemen mans dude businessman father dad groom fisherman cowboy"
WOMAN = "woman women lady ladies female females womans bride mother mom bridesmaids"
CHILD = "child children kid kids toddler toddlers baby babies infant youngster youngsters"
PEOPLE = (
    "person persons people someone somebody adult adults crowd crowds group family families couple couples friend "
    "friends human humans individuals teenager teenagers teen teens youth youths owner owners hand hands finger "
    "fingers arm arms leg legs foot feet face faces hair he she his her him they them himself herself themselves "
    "player players team teams teammate teammates opponent rider riders racer racers biker bikers cyclist cyclists "
    "bicyclist bicyclists bicycler motorcyclist motorcyclists driver jockey jockeys skateboarder skateboarders skater "
    "skaters skier skiers skiier skiiers snowboarder snowboarders surfer surfers swimmer swimmers diver climber "
    "climbers hiker hikers backpacker runner runners jumper boarder wakeboarder waterskier kayaker kayakers athlete "
    "athletes goalie pitcher catcher batter batsman quarterback referee footballer footballers wrestler wrestlers "
    "boxer dancer dancers singer musician musicians guitarist performer performers artist artists photographer "
    "cameraman audience spectators onlookers pedestrians pedestrian tourists passengers worker workers officer "
    "officers police policeman policemen soldier soldiers student students member members clown santa trainer coach "
    "instructor vendor pirate ninja rollerblader acrobat parents parent brunette blonde blond everyone nobody "
    "stranger elderly teenage customers guard men someones youngster beard bearded smiles smiling she mohawk"
)

# name | plural | group | Chinese | further words that mention it | words that make its absence doubtful.
# @boy … @people stand for the lists above.
_THINGS = """
dog | dogs | animal | 狗 | puppy puppies terrier terriers retriever greyhound greyhounds poodle collie labrador lab doberman pitbull dachshund husky beagle hound rottweiler dalmatian mutt pup bulldog corgi chihuahua sheepdog shepherd | animal animals pet pets boxer muzzle muzzled leash collar leashed breed breeds paw paws canine canines fetch barking
horse | horses | animal | 马 | pony ponies horseback stallion | animal animals jockey jockeys rodeo carriage bull equestrian polo saddle bronco riding rides ride rider riders donkey mule
bird | birds | animal | 鸟 | duck ducks goose geese pigeon pigeons seagull seagulls swan swans eagle parrot chicken owl gull heron hawk flamingo flamingos | animal animals flock wings beak feather feathers pet
cat | cats | animal | 猫 | kitten kittens kitty | animal animals pet tiger lion leopard
cow | cows | animal | 牛 | bull bulls cattle calf | animal animals rodeo farm herd herding
sheep | sheep | animal | 羊 | goat goats lamb lambs ram | animal animals farm herd herding sheepdog
monkey | monkeys | animal | 猴子 | gorilla chimpanzee ape | animal animals zoo
man | men | person | 男人 | guy guys male males gentleman gentlemen mans dude businessman father dad groom fisherman cowboy | @people @boy @child
woman | women | person | 女人 | lady ladies female females womans bride mother mom bridesmaids | @people @girl @child
boy | boys | person | 男孩 | | @people @child @man son brother
girl | girls | person | 女孩 | schoolgirl schoolgirls | @people @child @woman daughter sister
child | children | person | 孩子 | kid kids toddler toddlers boy boys girl girls baby babies infant | crowd crowds group family families people young youth teenager teenagers teen teenage student students son daughter little small youngster youngsters brother sister they team players
person | people | person | 人 | @people @boy @girl @man @woman @child | bike rides riding motorcycle car boat canoe kayak helmet shirt jacket sweater sleeve bikers owner surfboard skateboard sled parade race statue doll hat
crowd | crowds | person | 人群 | audience spectators onlookers | people group many several players parade stadium concert street city market team others stands race festival watch watching pedestrians
bike | bikes | vehicle | 自行车 | bicycle bicycles bmx cyclist cyclists bicyclist bicyclists tricycle unicycle bicycler | vehicle vehicles biking cycling motorcycle motorbike rider riders motocross street parked biker bikers
motorcycle | motorcycles | vehicle | 摩托车 | motorcycles motorbike motorbikes motorcyclist motorcyclists motocross dirtbike | bike bikes biker bikers vehicle vehicles scooter atv racer rider riders racing race moped wheeler
car | cars | vehicle | 汽车 | jeep suv van racecar taxi | vehicle vehicles truck street road traffic parking parked driving drives drive driver city racing race racetrack highway bus intersection
truck | trucks | vehicle | 卡车 | | vehicle vehicles car cars jeep van street road traffic suv
bus | buses | vehicle | 公共汽车 | | vehicle vehicles street traffic train
train | trains | vehicle | 火车 |  | vehicle vehicles tracks station railroad railway subway
boat | boats | vehicle | 船 | canoe canoes kayak kayaks raft rafts sailboat rowboat ship ships kayaker kayakers speedboat yacht canoeing kayaking rafting sailing | vehicle vessel watercraft rowing paddle paddles paddling dock pier waterskiing waterskier wakeboarding wakeboard wakeboarder harbor jet ocean lake river sea
scooter | scooters | vehicle | 滑板车 | | vehicle vehicles moped motorcycle skateboard bike
skateboard | skateboards | toy | 滑板 | skateboarder skateboarders skateboarding skateboards | skate skates skating skater ramp board boarder grinding grinds trick tricks skatepark rail handrail scooter halfpipe
surfboard | surfboards | toy | 冲浪板 | surfer surfers surfing | wave waves board boarding wakeboard wakeboarding boogie bodyboard windsurfing boarder surf surfs
snowboard | snowboards | toy | 滑雪板 | snowboarder snowboarders snowboarding | ski skier skis skiing board boarder snow snowy jump slope
sled | sleds | toy | 雪橇 | sledding sleigh toboggan | snow snowy hill tube innertube
ball | balls | toy | 球 |  | game play plays playing toy player players team sport goal bat racket racquet hockey lacrosse kick kicks kicking fetch fetching throw throws throwing catch catching ping pong bowling pool court match polo field soccer football basketball baseball volleyball tennis rugby softball golf cricket
frisbee | frisbees | toy | 飞盘 | disc disk | toy toys catch catches catching object fetch fetching ring throw mouth something jumps leaps item
kite | kites | toy | 风筝 | | parasail parachute glider kiteboarding
balloon | balloons | toy | 气球 | | party birthday parade ball inflatable festival
swing | swing | place | 秋千 |  | playground rope park hanging tire hammock bat club swings swinging
slide | slide | place | 滑梯 |  | playground sliding park slid waterslide inflatable slides
trampoline | trampolines | toy | 蹦床 | | bouncing bouncy bounce jumping jumps jump
snow | snow | scene | 雪 | snowy snowbank snowball snowcapped snowsuit snowman snowstorm snowmobile snowboard snowboarder snowboarding skier skiers skiing skis ski sled sledding | ice icy winter frozen wintry cold peak peaks mountain mountains mountaintop slope boarder white skiers skiier glacier
water | water | scene | 水 | ocean sea lake river pool pond stream creek waterfall puddle rapids splashing splashes splash splashed underwater waters swimming swims swim surfing surfer fountain | beach shore shoreline wet boat canoe kayak raft rafting dock pier bridge fish fishing sprinkler sprinklers hose spray spraying sprayed wading wades surfboard swimsuit bathing bath bathtub tub bikini mud muddy coast island marsh swamp canal harbor bay rain rainy wakeboard wakeboarding waterskiing waterskier diving dive dives diver wetsuit watery drink drinks drinking tide kayaking canoeing sailboat ship ice swimmer swimmers seashore soaked floating floats float wave waves surf surfs
beach | beaches | scene | 海滩 | seashore | sand sandy ocean sea wave waves coast bay surf surfer surfing surfboard water lake bikini boogie island tide dune dunes shore shoreline
sand | sand | scene | 沙子 | sandy dune dunes sandbox | beach shore shoreline desert dirt volleyball coast seashore ocean dust dusty sea track arena
grass | grass | scene | 草地 | grassy lawn meadow | field yard backyard park garden hill hillside pasture green soccer football baseball golf outside ground play playground plants weeds farm lake forest woods dog dogs tree trees path trail outdoors countryside rural area fence
mountain | mountains | scene | 山 | mountain mountaintop mountainside mountainous peak peaks summit | hill hills cliff cliffs rock rocks rocky slope ridge canyon valley snow snowy snowcapped climbing climber climbers climb climbs hiking hiker hikers hike ski skier skiing background landscape boulder view scenery glacier terrain ledge overlooking snowboarder snowboarding
rock | rocks | scene | 岩石 | rocks rocky boulder boulders cliff cliffs | mountain mountains climbing climber climb climbs canyon ledge hill gravel wall formation mountainside outcropping cave shore river stream waterfall statue ridge peak beach water ground desert terrain coast creek stone stones
forest | forests | scene | 森林 | woods wooded forested woodland jungle | tree trees trail path leaves park branch branches leafy wilderness foliage log mountain hiking outdoors pine brush wood nature bushes bush green hill camp
fire | fires | scene | 火 | flames burning bonfire campfire fireplace | smoke candle candles fireworks sparklers torch camping smoking grill
street | streets | place | 街道 | road crosswalk intersection highway | city urban traffic building buildings car cars bus truck town path pavement curb parade driveway walkway alley alleyway plaza square lane crossing outside downtown paved shop store parking parked village market taxi race racing asphalt blacktop walking walk walks storefront neighborhood marathon motorcycle bike bicycle sidewalk
building | buildings | place | 建筑 | buildings house houses skyscraper church tower castle barn hotel skyline | city urban street store shop town wall brick window windows door doorway apartment school station restaurant museum structure steps stairs stadium sidewalk outside roof village home porch shed cabin hut balcony yard backyard market park road arena mall garage graffiti downtown room inside indoors monument temple background neighborhood courtyard plaza crowd
playground | playgrounds | place | 游乐场 | | swing swings swinging slide slides sliding monkey park jungle bars gym equipment carnival fair amusement play ropes bouncy climbing toy school
pool | pools | place | 泳池 | | swimming swim swims swimmer swimmers diving water bath inflatable swimsuit dive dives splash splashing splashes trunks goggles underwater tub floats floating float
bridge | bridges | place | 桥 | overpass | dock pier walkway river canal boardwalk platform
fountain | fountains | place | 喷泉 | | water statue sprinkler sprinklers spray spraying plaza splash waterfall spout hose
bench | benches | place | 长椅 | | chair chairs seat seats seated sit sits sitting table park picnic
table | tables | place | 桌子 | desk | restaurant cafe kitchen dinner meal counter food eating eat eats bar drinking drinks bench picnic plate cup chairs chair room sit sits sitting party office bowl computer laptop
couch | couches | place | 沙发 | sofa | chair bed cushion seat room furniture pillow sit sits sitting lounge indoors living home inside laying lying blanket
bed | beds | place | 床 | | couch sofa pillow blanket room sleeping sleeps sheets mattress bedroom indoors crib inside laying lying
ramp | ramps | place | 坡道 | halfpipe | skateboard skateboarder skateboarding skate bmx bike trick tricks pipe jump half biker skater stunt rail concrete park
stage | stages | place | 舞台 | onstage concert | band singing sings singer performing performs perform performance performer musician musicians guitar microphone dance dancing dancers instruments play playing audience karaoke theater
fence | fences | place | 栅栏 | fenced | gate railing yard wall barrier backyard field baseball tennis court horse dog dogs park rail farm
flag | flags | object | 旗 | flags | parade banner banners protest race poles ski pole stadium boat costume
guitar | guitars | object | 吉他 | guitars guitarist | instrument instruments band musician musicians music playing plays concert stage
umbrella | umbrellas | object | 雨伞 | umbrellas parasol | rain sunshade beach shade restaurant cafe raining tent
book | books | object | 书 | books | reading reads read newspaper magazine paper
phone | phones | object | 电话 | cellphone phones telephone | talking talks mobile camera device cell texting
helmet | helmets | clothing | 头盔 | helmets helmeted hardhat | bike bicycle biker bikers cyclist cyclists motorcycle motorcyclist racer rider riders football hockey player players gear uniform uniforms skateboard skateboarder skater climber climbing snowboarder skier hat baseball motocross bmx lacrosse jockey horse kayak kayaker raft rafting skating scooter cricket goalie skateboarding atv racing
hat | hats | clothing | 帽子 | hats cap caps beanie sombrero | helmet costume costumes uniform uniforms winter snow snowy baseball cowboy santa police scarf officer bundled clothing head hoodie golf headband jockey dressed outfit sun cold wearing headscarf bandanna hood hooded
sunglasses | sunglasses | clothing | 墨镜 | | glasses goggles shades wearing sunny
stick | stick | object | 树枝 | branch | log wood bone mouth fetch hockey object something pole tree twig poles fetching toy chewing bat lacrosse club sticks
rope | ropes | object | 绳子 | ropes | climbing climber climbers climb climbs tug leash harness swing swings string rappelling chain tied water waterskiing wakeboarding cable line toy suspended bungee hanging parasail cord lasso
cup | cups | object | 杯子 | cups mug bottle bottles beer soda coffee | drink drinks drinking beverage bar can restaurant table dinner wine party cafe glass
backpack | backpacks | object | 背包 | backpacks | bag bags hiker hikers hiking backpacking backpacker pack gear luggage traveler climber school hike hikes carrying
tent | tents | object | 帐篷 | tents canopy | camp camping tarp umbrella market booth fair festival awning carnival
flower | flowers | object | 花 | flowers tulips bouquet | garden plants plant bride wedding flowered floral flowery bushes weeds field lei petals tree
bubbles | bubbles | object | 泡泡 | bubble | blowing gum soap foam underwater soapy
statue | statues | object | 雕像 | statues sculpture monument | fountain art figure lion dinosaur horse animal
wheelchair | wheelchairs | object | 轮椅 | | chair cart
""".strip()  # noqa: E501

# name | Chinese | words that mention it | words that make its absence doubtful
_ACTIONS = """
running | 跑步 | runs run running jogging jogs jog sprints sprinting trotting trots chase chases chasing bounding | play playing plays soccer football rugby baseball field fetch fetching fetches game player players walking walks frolic romp leaps leaping jumps jumping tag race racing races
jumping | 跳跃 | jump jumps jumped leap leaps leaping jumping midair airborne bounces hops | air flying flies trick tricks flip flips diving dives dive trampoline stunt catch catches catching bouncing hurdle skateboard dunk fly ramp running
swimming | 游泳 | swim swims swimming swimmer swimmers | pool water underwater diving dive dives splashing splashes wading wades lake ocean floating floats snorkeling river
sitting | 坐着 | sit sits sitting seated sat | bench chair couch resting rests relaxing laying lying lies lay kneeling squatting boat car swing ride rides riding motorcycle driving canoe kayak crouching crouches reading eating bus table horse restaurant stroller lounging perched
sleeping | 睡觉 | sleep sleeps sleeping asleep nap napping | laying lying lies lays rest resting rests bed relaxing
eating | 吃东西 | eat eats eating | food mouth meal dinner restaurant drink drinking biting bites bite table bowl plate cake cream candy snack lunch picnic feeding bone chewing chews licking licks
drinking | 喝水 | drink drinks drinking sips sipping | cup bottle beer beverage glass soda coffee water bar straw party fountain mouth
climbing | 攀爬 | climb climbs climbing climber climbers scaling scales rappelling ascending | rock rocks mountain cliff hiking hikes hiker ladder tree wall playground rope ropes harness steps stairs hanging
riding a bike | 骑自行车 | bicycling biking cycling cyclist cyclists bicyclist bicyclists biker bikers | bike bikes bicycle bicycles ride rides riding bmx rider motorcycle tricycle unicycle
skateboarding | 玩滑板 | skateboarding skateboarder skateboarders skateboard | skate skates skating skater skateboards ramp grinding grinds rail trick board boarder scooter
surfing | 冲浪 | surfs surfing surfer surfers | surfboard wave waves boogie board boarding wakeboarding wakeboard windsurfing waterskiing bodyboarding surf
skiing | 滑雪 | ski skis skiing skier skiers skiier skiiers | snow snowboarder slope waterskiing snowy snowboarding
snowboarding | 单板滑雪 | snowboard snowboarding snowboarder snowboarders | snow ski skier skiing slope skis boarder board snowy
dancing | 跳舞 | dance dances dancing dancer dancers | ballet performing performs perform costume costumes party stage concert ballerina pose posing spinning twirling
reading | 看书 | reads reading read | book books newspaper magazine paper sign map
talking | 说话 | talk talks talking chatting speaking speaks conversation chat | phone cellphone group people couple men women ladies friends crowd sit sits sitting stand standing interacting discuss singing microphone says
smoking | 抽烟 | smokes smoking | cigarette cigar pipe smoke
playing guitar | 弹吉他 | guitarist | guitar guitars instrument instruments band music musician musicians bass
playing soccer | 踢足球 | soccer | football kick kicks kicking ball goal field game player players team goalie
playing football | 打橄榄球 | football footballer footballers rugby quarterback | soccer ball field game player players team tackle tackled tackles tackling goal sooners
playing tennis | 打网球 | tennis racket racquet | ball badminton court
playing basketball | 打篮球 | basketball basketballs dunk | ball hoop hoops court dribbles dribbling player players team game gym net
playing baseball | 打棒球 | baseball softball pitcher batter | ball bat player players team game field glove catcher pitching base cricket mound umpire
playing hockey | 打曲棍球 | hockey puck | ice rink goalie stick player players team skating lacrosse game
driving | 开车 | drive drives driving driver | car cars truck jeep vehicle racing motorcycle atv bus race go wheeler tractor
fishing | 钓鱼 | fishing fisherman | fish boat rod pole net pier dock
kissing | 亲吻 | kiss kisses kissing | hug hugging hugs cheek embrace couple embracing lick licks licking face wedding
""".strip()  # noqa: E501

# scene | Chinese | words
_SCENES = """
snow | 雪地 | snow snowy snowbank snowcapped ski skier skiers skis skiing snowboarder snowboarding snowboard sled sledding icy
beach | 海滩 | beach seashore
sea | 海里 | ocean sea wave surf surfer surfing surfboard surfs
lake | 湖边 | lake pond
river | 河边 | river stream creek rapids
pool | 泳池 | pool
grass | 草地 | grass grassy lawn field meadow pasture
forest | 森林 | forest woods wooded forested woodland jungle
mountain | 山上 | mountain mountains mountaintop mountainside cliff cliffs summit peak canyon
street | 街上 | street streets road sidewalk city crosswalk intersection urban downtown
desert | 沙漠 | desert dune dunes
indoors | 室内 | indoors inside room kitchen couch sofa bed bathroom restaurant office carpet bedroom hallway gym
stage | 舞台 | stage onstage concert
playground | 游乐场 | playground
track | 赛道 | racetrack speedway
""".strip()  # noqa: E501

# Pairs of words that mean something else than either word alone.
PHRASES = {
    **dict.fromkeys(("swimming trunks", "swim trunks", "bathing trunks", "swimming shorts", "swim shorts"), "trunks"),
    **dict.fromkeys(("swimming suit", "swim suit", "bathing suit", "swimming gear"), "swimsuit"),
    **dict.fromkeys(("swimming pool", "wading pool", "kiddie pool"), "pool"),
    **dict.fromkeys(("toy car", "toy truck", "toy boat", "toy train", "toy horse", "stuffed animal"), "toy"),
    **dict.fromkeys(("stuffed dog", "stuffed bear", "teddy bear", "toy dog", "rocking horse"), "toy"),
    **dict.fromkeys(("fire hydrant", "hot dog", "hot dogs", "pool table", "bus stop", "train tracks"), "object"),
    **dict.fromkeys(("running shoes", "tennis shoes", "riding boots", "snow boots"), "shoes"),
    **dict.fromkeys(("jumping rope", "jump rope", "bike rack", "horse shoes", "rock band", "cup cakes"), "object"),
    **dict.fromkeys(("water bottle", "water bottles"), "bottle"),
    **dict.fromkeys(("fire truck", "fire engine"), "truck"),
    **dict.fromkeys(("tennis ball", "tennis balls", "golf ball", "soccer ball", "basket ball"), "ball"),
    **dict.fromkeys(("baseball cap", "baseball hat", "cowboy hat"), "hat"),
    **dict.fromkeys(("dirt bike", "dirt bikes", "motor bike", "motor cycle", "motocross bike"), "motorcycle"),
    **dict.fromkeys(("dirt biker", "motor biker", "motocross rider", "motocross biker"), "motorcyclist"),
    **dict.fromkeys(("mountain bike", "mountain bikes", "road bike", "exercise bike"), "bike"),
    **dict.fromkeys(("mountain biker", "mountain bikers", "mountain biking"), "cyclist"),
    **dict.fromkeys(("water skiing", "water skier", "water ski", "water skis"), "waterskiing"),
    **dict.fromkeys(("jet ski", "jet skis", "jet skiing", "jet skier"), "boat"),
    **dict.fromkeys(("rock climbing", "rock wall", "climbing wall", "rock climber", "rock climbers"), "climbing"),
    **dict.fromkeys(("jungle gym", "monkey bars"), "playground"),
    **dict.fromkeys(("table tennis", "beach ball", "beach volleyball"), "ball"),
    **dict.fromkeys(("street light", "street lights", "street sign", "flower bed"), "object"),
}

COLORS = {
    "red": "红色",
    "orange": "橙色",
    "yellow": "黄色",
    "green": "绿色",
    "blue": "蓝色",
    "purple": "紫色",
    "pink": "粉色",
    "brown": "棕色",
    "black": "黑色",
    "white": "白色",
    "grey": "灰色",
}
COLOR_WORDS = {
    **{name: name for name in COLORS},
    "gray": "grey",
    "silver": "grey",
    "violet": "purple",
    "navy": "blue",
    "aqua": "blue",
}
AMBIGUOUS_COLORS = ("golden", "gold", "blonde", "blond", "tan", "beige", "maroon")  # people disagree about these
COLORED_CLOTHES = {  # clothes whose color is asked for, and their synonyms
    "shirt": "shirt shirts tshirt",
    "jacket": "jacket jackets coat coats parka",
    "dress": "dress dresses",
    "hat": "hat hats cap caps beanie",
    "shorts": "shorts trunks",
    "pants": "pants jeans trousers",
    "helmet": "helmet helmets",
    "jersey": "jersey jerseys",
    "uniform": "uniform uniforms",
    "swimsuit": "swimsuit swimsuits bikini bathing",
    "sweater": "sweater sweatshirt hoodie",
    "suit": "suit suits",
}
COLORED_THINGS = (
    "dog",
    "ball",
    "bike",
    "car",
    "horse",
    "motorcycle",
    "slide",
    "frisbee",
    "boat",
    "surfboard",
    "truck",
)
NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")

_SIGNS = (
    "stop open exit sale taxi bank cafe park shop food city zoo bus gas hotel milk bread tea fish cake book map art "
    "film music door gate road north south east west up down hot cold new old big fast slow red blue green gold left "
    "right push pull home work help love moon sun star tree rain wind snow king"
)
SIGN_WORDS = tuple(_SIGNS.split())
SHAPES = {"circle": "圆形", "square": "方形", "triangle": "三角形", "star": "星形", "cross": "十字", "diamond": "菱形"}
PLACES_CHINESE = {
    "top left": "左上",
    "top middle": "上方中间",
    "top right": "右上",
    "middle left": "左边中间",
    "middle": "正中",
    "middle right": "右边中间",
    "bottom left": "左下",
    "bottom middle": "下方中间",
    "bottom right": "右下",
    "left": "左边",
    "right": "右边",
    "top": "上面",
    "bottom": "下面",
}


@dataclass(frozen=True)
class Word:
    """A thing, action or scene that captions mention.

    Attributes
    ----------
    name, plural, group, chinese : str
    words : frozenset of str
        Words that mention it.
    hidden : frozenset of str
        Words that make its absence doubtful; a caption with one of them is never used for a question about its absence.
    """

    name: str
    plural: str
    group: str
    chinese: str
    words: frozenset[str]
    hidden: frozenset[str]


def tokens(caption: str) -> list[str]:
    """Return the words of a caption in lower case, without digits and punctuation.

    Examples
    --------
    >>> tokens("A dog 's ball , near 2 T-shirts .")
    ['a', 'dog', 's', 'ball', 'near', 't', 'shirts']
    """
    return _SPLIT.findall(caption.lower())


def parse_words(text: str) -> frozenset[str]:
    """Parse a list of words, in which ``@people`` and similar names stand for the lists above."""
    lists = {"@boy": BOY, "@girl": GIRL, "@man": MAN, "@woman": WOMAN, "@child": CHILD, "@people": PEOPLE}
    return frozenset(part for word in text.split() for part in lists.get(word, word).split())


def _things() -> dict[str, Word]:
    table: dict[str, Word] = {}
    for line in _THINGS.splitlines():
        name, plural, group, chinese, words, hidden = (part.strip() for part in line.split("|"))
        mentions = parse_words(words) | {name, plural}
        table[name] = Word(name, plural, group, chinese, mentions, parse_words(hidden) - mentions)
    return table


def _actions() -> dict[str, Word]:
    table: dict[str, Word] = {}
    for line in _ACTIONS.splitlines():
        name, chinese, words, hidden = (part.strip() for part in line.split("|"))
        table[name] = Word(name, name, "action", chinese, parse_words(words), parse_words(hidden) - parse_words(words))
    return table


def _scenes() -> dict[str, Word]:
    table: dict[str, Word] = {}
    for line in _SCENES.splitlines():
        name, chinese, words = (part.strip() for part in line.split("|"))
        table[name] = Word(name, name, "scene", chinese, parse_words(words), frozenset())
    return table


THINGS = _things()
ACTIONS = _actions()
SCENES = _scenes()
